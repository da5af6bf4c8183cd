#!/usr/bin/env python3
"""Cost of an allocator for the served Debian model: page faults and time per request, memory during and after a burst of large
requests.

STERLING=... scripts/bench_heap.py [NAME=LIBRARY.so ...]: each library replaces the allocator of the C library by LD_PRELOAD, and
is compared with that allocator, both with default and with set thresholds. ROUNDS rounds alternate between all variants.
"""

import concurrent.futures
import os
import sys
import time

from served import STERLING, Server, header, median, quantile, row, store, users



def thresholds(trim_mb, mmap_mb):
    return {"MALLOC_TRIM_THRESHOLD_": str(trim_mb << 20), "MALLOC_MMAP_THRESHOLD_": str(mmap_mb << 20)}


VARIANTS = {"as it is": {}, "glibc, 64 and 16 MB": thresholds(64, 16), "glibc, 256 and 32 MB": thresholds(256, 32)}


def storm(server):
    """Sends a burst of expensive requests, in lists and alone, four at a time; returns the peak memory of the server."""
    large = lambda k: [body | {"k": k, "candidates": k, "columns": ["name"], "timeout_ms": 600_000} for body in users()[:8]]
    bodies = [{"requests": large(10_000)}] * 4 + large(60_000)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.retrieve, body) for body in bodies]
        peak = 0
        while not all(one.done() for one in asked):
            peak = max(peak, server.rss_mb())
            time.sleep(0.05)
    refused = [one.result()[0] for one in asked if one.result()[0] != 200]
    if refused:
        print(f"the storm was answered with {refused}")
    return peak


def measure(environment, folder):
    with Server(STERLING, folder, environment=environment) as server:
        connection = server.connect()
        bodies = [body | {"explain": True} for body in users()[:600]]
        for body in bodies[:100]:
            server.retrieve(body, connection)
        faults, cpu, _ = server.stat()
        passes, overarch = [], []
        for body in bodies:
            steps = server.retrieve(body, connection)[1]["explain"]["steps"]
            passes.append(sum(step["micros"] for step in steps) / 1000)
            overarch.append(next(step["micros"] for step in steps if step["name"] == "overarch") / 1000)
        faults_after, cpu_after, _ = server.stat()
        before = server.rss_mb()
        peak = storm(server)
        time.sleep(10)
        count = len(bodies)
        return (
            (faults_after - faults) / count, median(passes), quantile(passes, 0.99), median(overarch),
            (cpu_after - cpu) / count * 1000, before, peak, server.rss_mb(),
        )


def main():
    variants = VARIANTS | {name: {"LD_PRELOAD": path} for name, path in (word.split("=") for word in sys.argv[1:])}
    folder = store()
    rounds = [{name: measure(extra, folder) for name, extra in variants.items()} for _ in range(int(os.environ.get("ROUNDS", 3)))]
    header("allocator", "faults/request", "p50 ms", "p99 ms", "overarch p50 ms", "CPU ms/request", "MB before", "MB in a storm", "10 s later")
    for name in variants:
        row(name, *[float(median([r[name][figure] for r in rounds])) for figure in range(8)])


main()
