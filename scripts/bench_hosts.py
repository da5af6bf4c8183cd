#!/usr/bin/env python3
"""Measures the cost of embedding rows on other hosts.

    STERLING=... [SECONDS=20] [RATE=100] scripts/bench_hosts.py

Compares the Debian model with its tables in the memory of one server, with rows partitioned over two servers, and on a Redis
Cluster without a cache (three primaries). Users are embedded (`:embed`), which looks up the tables, with 30 random packages each.
Rounds alternate; reports p50 and p99 in ms, and the requests of the server to other servers. The lower bound is a round trip on
loopback with 8 bytes per row there and a row back. Needs redis-server and redis-cli.
"""

import contextlib
import json
import os
import random
import subprocess

from bench_slow_node import free_ports, start_cluster
from served import FOLDER, ROOT, STERLING, Server, bench, header, median, publish, requests_file, row, seconds, users

RATE = float(os.environ.get("RATE", 100))
ROUNDS = int(os.environ.get("ROUNDS", 3))
PACKAGES = 63_436
HOST = """
[[hosts]]
name = "{name}"
dram_gib = 4
bandwidth_gb_s = 10
row_ns = 10
call_us = 1
servers = ["127.0.0.1:{port}"]
"""


def plan(name, topology, *flags):
    """Writes a plan to a file."""
    path = FOLDER / f"{name}.toml"
    path.write_text(topology)
    command = [STERLING, "plan", str(ROOT / "models/debian"), "--topology", str(path), "--json", *flags]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for shard in (shard for table in found["tables"] for shard in table["shards"] if shard["tier"] == "remote"):
        shard["cache_bytes"] = 0
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(found))
    return str(path)


def counted(server, metric, label=""):
    """Returns the sum of a counter over the series that contain this label."""
    lines = server.get("/metrics")[1].decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(metric + "{") and label in line)


def main():
    seeds, _ = start_cluster()
    cluster = [word for seed in seeds for word in ("--remote", seed)]
    folder = FOLDER / "hosts"
    folder.mkdir()
    publish(STERLING, folder, cluster)
    ports = free_ports(2)
    hosts = "".join(HOST.format(name=f"h{n}", port=port) for n, port in enumerate(ports))
    between = plan("between", hosts + "[network]\nbandwidth_gb_s = 1\nlatency_us = 300\n", "--tier", "host", "--sharding", "row_wise")
    remote = plan("remote", HOST.format(name="h0", port=1), *cluster, "--tier", "remote")
    generator = random.Random(1)
    rows = lambda: [generator.randrange(PACKAGES) for _ in range(30)]
    bodies = requests_file("users", [{"features": user["features"] | {"installed": rows()}} for user in users()])
    part = lambda n: ["--plan", between, "--host", f"h{n}"]
    with contextlib.ExitStack() as stack:
        # The servers wait for each other at startup, so both are started before the script waits for the first.
        command = [STERLING, "serve", "--store", str(folder), "--listen", f"127.0.0.1:{ports[1]}", *part(1)]
        second = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(second.kill)
        servers = {
            "local": stack.enter_context(Server(STERLING, folder)),
            "between servers": stack.enter_context(Server(STERLING, folder, *part(0), listen=f"127.0.0.1:{ports[0]}")),
            "cluster": stack.enter_context(Server(STERLING, folder, "--plan", remote, *cluster)),
        }
        times = {name: [] for name in servers}
        for _ in range(ROUNDS):
            for name, server in servers.items():
                flags = ["--requests", bodies, "--call", "embed", "--rate", RATE, "--seconds", seconds(20)]
                line = bench(server.url, *flags)[0]["classes"][0]
                times[name].append((line["answered_ms"]["p50"], line["answered_ms"]["p99"], line["goodput"]))
        header("tables", "p50 ms", "p99 ms", "goodput/s", "calls a request", "rows a request")
        for name, server in servers.items():
            p50, p99, goodput = (median([found[n] for found in times[name]]) for n in range(3))
            asked = max(counted(server, "sterling_requests_total", 'call="embed",status="200"'), 1)
            calls, rows_asked = (counted(server, f"sterling_peer_{what}_total") for what in ("calls", "rows"))
            row(name, p50, p99, goodput, calls / asked, rows_asked / asked)


main()
