#!/usr/bin/env python3
"""Two routers over three shards of two servers each, all in network namespaces, while versions are switched and servers fail.

STERLING=... [FLIPS=200] scripts/chaos_shards.py, as root.

Two clients send requests to each router in a loop. In each round a server is killed (SIGKILL), terminated, stopped, isolated from
all, or isolated from one of the routers; then the desired version of the store changes, and once both routers answer with the new version, the
server is restored. Every answer must be 200, entirely of the version that it names, and complete: no request may fail while a
server of each shard runs. At the end both servers of a shard are killed: answers must report exactly their coverage, and contain
nothing of that shard.
"""

import collections
import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from spaces import STERLING, Sterling, run, spaces, until

FLIPS = int(os.environ.get("FLIPS", 200))
FOLDER = Path(tempfile.mkdtemp(prefix="sterling-shards-"))
SHARDS, REPLICAS, COUNT = 3, 2, 240
# Ids of the first version are below this number, ids of the second version are at or above it.
SECOND = 100_000
MODEL = "/v1/models/items"
BRIDGE = "strl-bridge"
SERVERS = [f"strl-s{n}" for n in range(SHARDS * REPLICAS)]
ROUTERS = [f"strl-r{n}" for n in range(2)]
ADDRESSES = {name: f"10.93.0.{n}" for n, name in enumerate(SERVERS + ROUTERS, start=11)}
STRIKES = ["killed", "ended", "stopped", "cut off from all", "cut off from one router"]


def network(stack):
    """Creates a namespace for each server and router, all on one bridge with the clients."""
    spaces(stack, SERVERS + ROUTERS, [BRIDGE, *(f"{name}-o" for name in ADDRESSES)])
    run(f"ip link add {BRIDGE} type bridge")
    run(f"ip addr add 10.93.0.1/24 dev {BRIDGE}")
    run(f"ip link set {BRIDGE} up")
    for name, address in ADDRESSES.items():
        run(f"ip link add {name}-o type veth peer name {name}-i netns {name}")
        run(f"ip link set {name}-o master {BRIDGE} up")
        run(f"ip -n {name} addr add {address}/24 dev {name}-i")
        run(f"ip -n {name} link set {name}-i up")


class Member(Sterling):
    """A server or a router."""

    def __init__(self, name, arguments):
        quick = {"STERLING_REFRESH_MS": "100", "STERLING_ROUTE__REFRESH_MS": "100"}
        super().__init__(name, ADDRESSES[name], arguments, os.environ | quick)

    def version(self):
        status, text = self.ask("POST", f"{MODEL}:retrieve", {"vector": [1, 0, 0, 0], "k": 1, "timeout_ms": 20_000})
        return json.loads(text).get("version") if status == 200 else None

    def has_all(self):
        """Returns whether a router knows all running servers."""
        status, text = self.ask("GET", f"{MODEL}/shards")
        return status == 200 and all(shard["servers"] == REPLICAS for shard in json.loads(text)["shards"])


class Client(threading.Thread):
    """Sends requests to a router in a loop, and compares each answer with the version that it names."""

    # Requests for the complete version, so that missing items are detected; some requests search by codes.
    BODIES = [
        {"vector": [0.3, 0.5, 0.1, 1], "k": COUNT, "probes": 6, "timeout_ms": 20_000},
        {"vector": [0.3, -0.5, 0.1, 1], "k": COUNT, "exact": True, "columns": ["n"], "timeout_ms": 20_000},
        {"vector": [0.3, 0.5, 0.1, 1], "k": 20, "probes": 6, "timeout_ms": 20_000},
    ]

    def __init__(self, router):
        super().__init__(daemon=True)
        self.router, self.is_over, self.wrong = router, False, []
        self.answers, self.slowest = collections.Counter(), 0.0

    def run(self):
        while not self.is_over:
            body = self.BODIES[self.answers.total() % len(self.BODIES)]
            start = time.monotonic()
            try:
                status, text = self.router.ask("POST", f"{MODEL}:retrieve", body)
            except (OSError, http.client.HTTPException) as e:
                self.wrong.append(f"the router does not answer: {e}")
                return
            took = time.monotonic() - start
            self.slowest = max(self.slowest, took)
            answer = json.loads(text)
            if status != 200:
                self.wrong.append(f"lost after {took:.1f} s: {status} {answer}")
                return
            ids = [item["id"] for item in answer["items"]]
            is_whole = len(set(ids)) == len(ids) == body["k"] and answer["coverage"] == 1
            if not is_whole or any((id >= SECOND) != (answer["version"] == 2) for id in ids):
                self.wrong.append(f"version {answer['version']}, coverage {answer['coverage']}, {len(ids)} items: {ids}")
                return
            self.answers[answer["version"]] += 1


def sterling(*arguments):
    subprocess.run([STERLING, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def published(first):
    lines = FOLDER / "items.jsonl"
    with lines.open("w") as file:
        for n in range(COUNT):
            x = n * 37 % 101 * 0.06
            item = {"id": first + n, "embedding": [math.sin(x), math.cos(x), n % 7 - 3, 1], "attributes": {"n": n}}
            file.write(json.dumps(item) + "\n")
    recipe = FOLDER / "recipe.toml"
    recipe.write_text("[index]\nlists = 6\n")
    sterling("publish", "--name", "items", "--items", lines, "--store", FOLDER / "store", "--shards", SHARDS, "--index", recipe)


def strike(server, name, how):
    """Injects a fault into a server. Returns the function that ends the fault."""
    assert server.is_running(), "the target process runs"
    if how == "killed":
        server.kill()
        return server.start
    if how == "ended":
        server.process.terminate()
        return lambda: (server.process.wait(), server.start())
    if how == "stopped":
        server.process.send_signal(signal.SIGSTOP)
        return lambda: server.process.send_signal(signal.SIGCONT)
    if how == "cut off from all":
        run(f"ip link set {name}-o down")
        return lambda: run(f"ip link set {name}-o up")
    # The answers of the server to that router are dropped.
    run(f"ip -n {name} route add blackhole {ADDRESSES[ROUTERS[0]]}/32")
    return lambda: run(f"ip -n {name} route del blackhole {ADDRESSES[ROUTERS[0]]}/32")


def of_two_shards(router):
    """Returns whether a router answers without the lost shard; checks the content of the answer."""
    body = Client.BODIES[1]
    status, text = router.ask("POST", f"{MODEL}:retrieve?min_coverage=0.1", body)
    answer = json.loads(text)
    if status != 200 or answer["coverage"] == 1:
        return None
    covered = len({item["id"] for item in answer["items"]}) / COUNT
    assert answer["coverage"] == covered and answer["missing"][0]["shard"] == 1, answer
    assert router.ask("POST", f"{MODEL}:retrieve", body)[0] == 503
    return covered


def main():
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, FOLDER, ignore_errors=True)
        network(stack)
        for first in (0, SECOND):
            published(first)
        for version in (1, 2):
            # A labelled version stays in memory.
            sterling("label", "items", f"v{version}", version, "--store", FOLDER / "store")
        serve = lambda n: ["serve", "--store", FOLDER / "store", "--shard", n // REPLICAS]
        servers = [Member(name, serve(n)) for n, name in enumerate(SERVERS)]
        stack.callback(lambda: [server.kill() for server in servers])
        until("the servers are ready", lambda: all(server.is_ready() for server in servers))
        all_servers = [word for name in SERVERS for word in ("--server", f"{ADDRESSES[name]}:8080")]
        routers = [Member(name, ["route", *all_servers]) for name in ROUTERS]
        stack.callback(lambda: [router.kill() for router in routers])
        until("the routers are ready", lambda: all(router.is_ready() for router in routers))
        clients = [Client(router) for router in routers * 2]
        for client in clients:
            client.start()
        wrong = lambda: [line for client in clients for line in client.wrong]
        answers = lambda: sum(client.answers.total() for client in clients)
        start, done, active = time.monotonic(), collections.Counter(), 2
        until("the clients are answered", lambda: answers() > 40, detail=wrong)
        for n in range(FLIPS):
            # Cycles through all servers and all faults; two servers of one shard are never down together.
            struck, how = n * 5 % len(servers), STRIKES[(n + n // len(servers)) % len(STRIKES)]
            heal = strike(servers[struck], SERVERS[struck], how)
            before = answers()
            until("answers without the failed server", lambda: answers() > before + 8, detail=wrong)
            active = 3 - active
            sterling("activate", "items", active, "--store", FOLDER / "store")
            for router in routers:
                until("the other version", lambda: router.version() == active, detail=wrong)
            heal()
            until("the server is ready", servers[struck].is_ready)
            until("both routers have all servers", lambda: all(router.has_all() for router in routers), detail=wrong)
            done[how] += 1
            if wrong():
                raise SystemExit(f"round {n}, server {struck} {how}: {wrong()}")
        for client in clients:
            client.is_over = True
        for client in clients:
            client.join()
        if wrong():
            raise SystemExit(wrong())
        took, asked = time.monotonic() - start, sum((client.answers for client in clients), collections.Counter())
        for server in servers[REPLICAS : 2 * REPLICAS]:
            assert server.is_running(), "the target process runs"
            server.kill()
        until("both routers report the lost shard", lambda: all(of_two_shards(router) for router in routers))
        covered = of_two_shards(routers[0])
        strikes = ", ".join(f"{count} x {how}" for how, count in done.items())
        print(f"{FLIPS} flips in {took:.0f} s, servers {strikes}: {asked[1]} and {asked[2]} answers of the two versions, all 200 and complete")
        print(f"the slowest answer took {max(client.slowest for client in clients):.2f} s; without a shard {covered:.4f} of the items, as reported")


if __name__ == "__main__":
    main()
