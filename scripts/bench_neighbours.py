#!/usr/bin/env python3
"""Effect of an expensive request on concurrent cheap requests.

    STERLING=... [PEER=...] [SECONDS=20] scripts/bench_neighbours.py

Finds the most expensive allowed request: lists of requests for all items, with a decreasing number of results, until one is
answered with 200. Measures cheap requests alone and concurrently with a sequence of expensive ones; then compares the memory
after a burst of expensive requests with the memory before it.
"""

import concurrent.futures
import json
import os
import threading
import time

from served import Server, bench, binaries, finish, header, requests_file, row, seconds, store, users, verdict

RATE = 50
# Maximum number of requests in a tried list; a server without limits on work takes a minute for 40 requests.
LIST_MAX = int(os.environ.get("LIST_MAX", 40))


def ask(server, body, connection=None):
    """Returns whether a body was answered completely. Parsing the answer would take more CPU time than the server needs."""
    asked = connection or server.connect(timeout=900)
    asked.request("POST", "/v1/models/debian:retrieve", json.dumps(body), {"content-type": "application/json"})
    answer = asked.getresponse()
    is_whole, piece = answer.status == 200, b""
    while more := answer.read(1 << 20):
        is_whole &= b'"problem"' not in piece[-16:] + more
        piece = more
    if connection is None:
        asked.close()
    return is_whole


def dearest(server):
    """Returns the body of the most expensive request that the server accepts, and the request's time without other load."""
    user = users()[0]
    for count in (count for count in (40, 16, 8, 4, 2, 1) if count <= LIST_MAX):
        for k in (60_000, 30_000, 10_000, 3_000, 1_000):
            one = user | {"k": k, "candidates": k, "columns": ["name", "short", "section", "tags"], "timeout_ms": 600_000}
            body = {"requests": [one] * count} if count > 1 else one
            start = time.time()
            if ask(server, body):
                return body, f"{count} x k = {k}", time.time() - start
    raise SystemExit("no expensive request is admitted")


def measure(name, binary, cheap):
    with Server(binary, store(binary, name)) as server:
        load = ["--requests", cheap, "--rate", RATE, "--seconds", seconds(20)]
        bench(server.url, *load)
        alone = bench(server.url, *load)[0]["classes"][0]
        before = server.rss_mb()
        body, kind, took = dearest(server)
        stop = threading.Event()

        def ask_on():
            connection = server.connect(timeout=900)
            while not stop.is_set():
                ask(server, body, connection)

        asking = threading.Thread(target=ask_on)
        asking.start()
        time.sleep(0.5)
        beside = bench(server.url, *load)[0]["classes"][0]
        stop.set()
        asking.join()
        peak = [server.rss_mb()]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            storm = [pool.submit(ask, server, body) for _ in range(4)]
            while not all(one.done() for one in storm):
                peak.append(server.rss_mb())
                time.sleep(0.1)
        time.sleep(10)
        after = server.rss_mb()
    p99 = lambda found: (found["answered_ms"] or {"p99": float("inf")})["p99"]
    p50 = lambda found: (found["answered_ms"] or {"p50": float("inf")})["p50"]
    row(name, kind, took, p50(alone), p99(alone), p50(beside), p99(beside), beside["requests"] - beside["ok"], before, max(peak), after)
    return p99(alone), p99(beside), beside, before, after


def main():
    cheap = requests_file("cheap", [user | {"candidates": 100, "timeout_ms": 10_000} for user in users()])
    header("server", "dearest", "its s", "p50 alone", "p99 alone", "p50 beside", "p99 beside", "not answered", "MB before", "MB in the storm", "MB 10 s later")
    own, *_ = [measure(name, binary, cheap) for name, binary in binaries().items()]
    alone, beside, found, before, after = own
    verdict(beside <= 3 * alone, f"p99 of a cheap request during the most expensive request {beside:.1f} ms, {beside / alone:.1f} x of alone, expected at most 3 x")
    verdict(found["ok"] == found["requests"], f"{found['requests'] - found['ok']} cheap requests were not answered in time, expected 0")
    verdict(after <= 1.2 * before, f"memory after the storm {after:.0f} MB, {after / before:.2f} x of before, expected at most 1.2 x")
    finish()


main()
