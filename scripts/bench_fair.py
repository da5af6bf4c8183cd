#!/usr/bin/env python3
"""Effect of a caller with very many expensive requests on another caller.

    STERLING=... [SECONDS=30] [CONNECTIONS=1400] scripts/bench_fair.py

CONNECTIONS of one caller send requests in a loop, each as soon as the previous request is answered or rejected: the most expensive
request that counts as short, a request just below `engine.expensive_request_ms`, and the most expensive list that is allowed at all.
Another caller sends its usual load, first to this server, then to a second server without other callers: the difference to its p99
alone is what the processes that share the cores cost. Callers are identified by their keys, then, at a server without keys, by
their addresses (127.0.0.2 and 127.0.0.1).
"""

import asyncio
import collections
import contextlib
import json
import math
import os
import resource
import time

from served import STERLING, Server, bench, beside, finish, header, keys, median, requests_file, row, seconds, store, users, verdict

CONNECTIONS = int(os.environ.get("CONNECTIONS", 1400))
RATE = 20
# Cost of the requests in milliseconds; the second cost is just below `engine.expensive_request_ms`, which is 20 by default.
COSTS = {"short": 4, "below the limit": 18}
LIST_MAX = 1024
PATH = "/v1/models/debian:retrieve"


class Attacker(asyncio.Protocol):
    """A connection that repeats one request."""

    def __init__(self, request, counts, ended):
        self.request, self.counts, self.ended = request, counts, ended

    def connection_made(self, transport):
        self.transport, self.answer = transport, b""
        transport.write(self.request)

    def data_received(self, data):
        self.answer += data
        head, is_whole, body = self.answer.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        length = fields.get(b"content-length")
        if is_whole and (body.endswith(b"0\r\n\r\n") if length is None else len(body) >= int(length)):
            self.counts[int(head.split()[1])] += 1
            self.answer = b""
            self.transport.write(self.request)

    def connection_lost(self, _):
        self.ended.set()


async def keep(request, address, source, counts):
    """Keeps one connection open, and reopens it whenever it ends."""
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    while True:
        ended = asyncio.Event()
        with contextlib.suppress(OSError):
            await loop.create_connection(lambda: Attacker(request, counts, ended), host, int(port), local_addr=(source, 0))
            await ended.wait()
        counts["cut"] += 1
        await asyncio.sleep(0.1)


def attack(request, address, source, stop, found):
    """Runs all connections of the attacker."""
    counts = collections.Counter()

    async def all_of_them():
        asking = [asyncio.create_task(keep(request, address, source, counts)) for _ in range(CONNECTIONS)]
        await asyncio.to_thread(stop.wait)
        seen = dict(counts)
        for one in asking:
            one.cancel()
        return seen

    found.send(asyncio.run(all_of_them()))


def costly(candidates, count=1):
    """Returns a request, or a list of requests, that takes long and has a small answer."""
    one = users()[0] | {"k": 1, "candidates": candidates, "timeout_ms": 600_000}
    return one if count == 1 else {"requests": [one] * count}


def most_costly(server, headers):
    """Returns the most expensive request body under each limit, with its time without other load in milliseconds."""

    def took(body):
        """Returns the milliseconds until the answer is complete, or infinity without an answer."""
        connection, times = server.connect(timeout=900), []
        for _ in range(3):
            start = time.perf_counter()
            connection.request("POST", PATH, json.dumps(body), headers)
            answer = connection.getresponse()
            if b'"problem"' in answer.read() or answer.status != 200:
                return math.inf
            times.append(1000 * (time.perf_counter() - start))
        return median(times)

    found = {}
    candidates = 1
    for name, most_ms in COSTS.items():
        while (more := max(candidates + 1, candidates * 5 // 4)) < 100_000 and (ms := took(costly(more))) < most_ms:
            candidates = more
            found[name] = costly(candidates), ms
    candidates, count = 60_000, LIST_MAX
    while (ms := took(costly(candidates, count))) == math.inf:
        count //= 2
    found["the most"] = costly(candidates, count), ms
    return found


def other(server, flags, requests):
    """Runs the usual load of the other caller."""
    line = bench(server.url, *flags, "--requests", requests, "--rate", RATE, "--seconds", seconds(30))[0]
    counts = line["classes"][0]
    times = counts["answered_ms"] or {"p50": math.inf, "p99": math.inf}
    return counts["ok"] / counts["requests"], times["p50"], times["p99"]


def measure(how, environment, key, source):
    """Measures the effect of the attacker with one way to identify callers."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key['attacker']}"} if key else {})
    flags = ["--key", key["other"]] if key else []
    requests = requests_file("users", users())
    with Server(STERLING, store(), environment=environment) as server:
        bodies = most_costly(server, headers)
    for kind, (body, ms) in bodies.items():
        text = json.dumps(body)
        lines = [f"POST {PATH} HTTP/1.1", "host: sterling", *(f"{name}: {value}" for name, value in headers.items()), f"content-length: {len(text)}"]
        request = ("\r\n".join(lines) + "\r\n\r\n" + text).encode()
        # A new server for each measurement, so that no state carries over.
        with contextlib.ExitStack() as stack:
            server, unused = (stack.enter_context(Server(STERLING, store(), environment=environment)) for _ in range(2))
            for one in (server, unused):
                bench(one.url, *flags, "--requests", requests, "--rate", RATE, "--seconds", 2)
            _, _, alone = other(server, flags, requests)
            with beside(attack, request, server.address, source) as counts:
                time.sleep(2)
                success, p50, p99 = other(server, flags, requests)
                _, _, elsewhere = other(unused, flags, requests)
        statuses = ", ".join(f"{count} of {status}" for status, count in sorted(counts.items(), key=str))
        row(how, kind, ms, statuses, 100 * success, p50, p99, elsewhere, alone)
        verdict(counts.keys() & {200, 503} != set(), f"{how}, {kind}: the attacker got answers, 200 or 503")
        verdict(success >= 0.99, f"{how}, {kind}: {success:.1%} of the other caller's requests were answered in time, expected 99 %")
        verdict(p99 <= 3 * alone, f"{how}, {kind}: the other caller's p99 {p99:.1f} ms, {p99 / alone:.1f} x of alone, expected at most 3 x")


def main():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    path, key = keys("attacker", "other")
    header("callers by", "requests", "ms alone", "answers to the attacker", "other: % in time", "p50 ms", "p99 ms", "p99 at an unused server", "p99 alone")
    measure("keys", {"STERLING_ACCESS__KEYS": path}, key, "127.0.0.1")
    measure("addresses", {}, {}, "127.0.0.2")
    finish()


main()
