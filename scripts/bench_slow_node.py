#!/usr/bin/env python3
"""Effect of a slow cluster node on requests that do not need it.

    STERLING=... [PEER=...] [SECONDS=20] scripts/bench_slow_node.py

Three primaries of a Redis Cluster without replicas, so that no other node can answer for the slow node; the table `packages` is
stored there, with a cache that is too small for it. One node is announced with the port of a proxy, which delays its replies by DELAY_MS (20).
Requests without `installed` need no remote row, all other requests do. Needs redis-server and redis-cli.
"""

import asyncio
import atexit
import contextlib
import json
import os
import random
import socket
import subprocess
import threading

from served import FOLDER, ROOT, Server, bench, binaries, finish, header, requests_file, row, seconds, store, users, verdict, wait

DELAY_MS = float(os.environ.get("DELAY_MS", 20))
# Size of the row cache in bytes; the table has 63,436 rows.
CACHE_BYTES = 1 << 18


class Proxy(threading.Thread):
    """Forwards bytes between its own port and another port, replies after a delay."""

    def __init__(self, port, behind):
        super().__init__(daemon=True)
        self.port, self.behind, self.delay_s = port, behind, 0.0
        self.start()

    def run(self):
        asyncio.run(self.serve())

    async def serve(self):
        server = await asyncio.start_server(self.accept, "127.0.0.1", self.port)
        await server.serve_forever()

    async def accept(self, reader, writer):
        with contextlib.suppress(OSError):
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.behind)
            await asyncio.gather(self.forward(reader, there_writer), self.answer(there_reader, writer))

    async def forward(self, reader, writer):
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                writer.write(part)
        writer.close()

    async def answer(self, reader, writer):
        loop, due = asyncio.get_running_loop(), 0.0
        with contextlib.suppress(OSError):
            while part := await reader.read(1 << 16):
                # A chunk must not arrive before an earlier one when the delay is reduced.
                due = max(due, loop.time() + self.delay_s)
                if self.delay_s:
                    loop.call_at(due, writer.write, part)
                else:
                    writer.write(part)
        writer.close()


def free_ports(count):
    """Returns ports below the ephemeral range."""
    found, port = [], random.randrange(12_000, 28_000)
    while len(found) < count:
        port += 1
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def ask(port, *words):
    return subprocess.run(["redis-cli", "-p", str(port), *map(str, words)], stdout=subprocess.PIPE, text=True, check=True).stdout


def start_cluster():
    """Returns the addresses of three primaries, and the proxy in front of the last one."""
    *ports, proxied = free_ports(7)
    clients, buses = ports[:3], ports[3:]
    for number, (port, bus) in enumerate(zip(clients, buses)):
        folder = FOLDER / f"node{number}"
        folder.mkdir()
        command = ["redis-server", "--port", port, "--cluster-port", bus, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--cluster-node-timeout", "5000"]
        command += ["--cluster-announce-ip", "127.0.0.1", "--cluster-announce-bus-port", bus]
        command += ["--cluster-announce-port", proxied] if number == 2 else []
        node = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(node.kill)
        wait("a node answers", lambda: "PONG" in ask(port, "PING") if is_open(port) else False)
    proxy = Proxy(proxied, clients[2])
    for number, port in enumerate(clients):
        ask(port, "CLUSTER", "ADDSLOTSRANGE", number * 16_384 // 3, (number + 1) * 16_384 // 3 - 1)
    for port in clients[1:]:
        ask(port, "CLUSTER", "MEET", "127.0.0.1", clients[0], buses[0])
    whole = lambda port: "cluster_state:ok" in (info := ask(port, "CLUSTER", "INFO")) and "cluster_known_nodes:3" in info
    wait("the cluster is whole", lambda: all(whole(port) for port in clients))
    wait("the proxy is announced", lambda: str(proxied) in ask(clients[0], "CLUSTER", "SLOTS"))
    return [f"redis://127.0.0.1:{port}" for port in [*clients[:2], proxied]], proxy


def is_open(port):
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def plan(binary):
    """Returns the plan of this host, with the rows of one table on the cluster."""
    done = subprocess.run([binary, "plan", str(ROOT / "models/debian"), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout)
    for table in found["tables"]:
        if table["table"] == "packages":
            for shard in table["shards"]:
                shard |= {"tier": "remote", "backing": "cluster", "cache_bytes": CACHE_BYTES}
    path = FOLDER / "plan.json"
    path.write_text(json.dumps(found))
    return path


def requests():
    """Returns requests without remote rows, requests with remote rows, and a mix of both."""
    generator = random.Random(1)
    local = [{"features": {k: v for k, v in user["features"].items() if k != "installed"}, "exclude": user["exclude"]} for user in users()]
    rows = lambda: [generator.randrange(63_436) for _ in range(30)]
    remote = [user | {"features": user["features"] | {"installed": rows()}} for user in users()]
    both = [body for pair in zip(local, remote) for body in pair]
    return requests_file("local", local), requests_file("remote", remote), requests_file("both", both)


def measure(name, binary, seeds, proxy):
    local, remote, both = requests()
    cluster = [word for seed in seeds for word in ("--remote", seed)]
    folder = store(binary, name, [*cluster, "--remote-table", "packages"])
    with Server(binary, folder, "--plan", str(plan(binary)), *cluster) as server:
        proxy.delay_s = 0.0
        peak = bench(server.url, "--requests", both, "--find-peak", "--rate", 50, "--seconds", min(5, seconds(20)))[-1]["peak"]
        half = ["--requests", local, "--rate", peak["rate"] / 4, "--beside", remote, "--beside-rate", peak["rate"] / 4, "--seconds", seconds(20)]
        full = ["--requests", both, "--rate", peak["goodput"], "--seconds", seconds(20)]
        steady = bench(server.url, *half)[0]
        proxy.delay_s = DELAY_MS / 1000
        slow, loaded = bench(server.url, *half)[0], bench(server.url, *full)[0]
        p99 = lambda line, number: (line["classes"][number]["answered_ms"] or {"p99": float("inf")})["p99"]
        goodput = loaded["classes"][0]["goodput"]
        row(name, peak["goodput"], p99(steady, 0), p99(steady, 1), p99(slow, 0), p99(slow, 1), goodput, slow["void"] or loaded["void"] or "")
    return p99(slow, 0) / p99(steady, 0), goodput / peak["goodput"]


def main():
    seeds, proxy = start_cluster()
    header("server", "peak/s", "p99 local", "p99 remote", f"p99 local, a node at {DELAY_MS} ms", "p99 remote, so", "goodput at the peak's rate, so", "void")
    (slower, share), *_ = [measure_alone(name, binary, seeds, proxy) for name, binary in binaries().items()]
    verdict(slower <= 1.2, f"p99 of requests without remote rows {slower:.2f} x beside a slow node, expected at most 1.2 x")
    verdict(share >= 0.9, f"goodput with a slow node {share:.1%} of the workers' capacity, expected at least 90 %")
    finish()


def measure_alone(name, binary, seeds, proxy):
    """Measures one binary with an emptied cluster, because all binaries publish under the same names."""
    proxy.delay_s = 0.0
    for seed in seeds:
        ask(seed.rsplit(":", 1)[1], "FLUSHALL")
    return measure(name, binary, seeds, proxy)


if __name__ == "__main__":
    main()
