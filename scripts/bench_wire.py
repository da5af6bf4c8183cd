#!/usr/bin/env python3
"""Cost of the wire format on top of a pass: JSON, JSON by columns, Arrow and compression, at several K.

Sends requests to one server one after another, with alternating forms, so that other load on the machine affects all forms
alike. The time of the pass is reported by the server with each answer (`Server-Timing`: the steps of `explain`). The time of the
call is measured by this client until the last byte of the answer: requests are prepared beforehand, and only the length of an answer is read. A
table of medians goes to stdout, with the time that each form adds to the pass, the ratio of call to pass, and the time of an empty call
(`/livez`).

    sterling demo                                     # or any server
    scripts/bench_wire.py --url http://127.0.0.1:8080 --model debian --body '{"features": {"installed": [832, 835]}}'
"""

import argparse
import json
import re
import socket
import statistics
import time
import urllib.parse

ARROW = "application/vnd.apache.arrow.stream"
FORMS = {
    "json": ({}, {}),
    "columns": ({"format": "columns"}, {}),
    "arrow": ({}, {"accept": ARROW}),
    "gzip": ({}, {"accept-encoding": "gzip"}),
    "zstd": ({}, {"accept-encoding": "zstd"}),
}


def passed(header: str) -> float:
    """Returns the milliseconds of the steps in ``Server-Timing``, without the total."""
    steps = re.findall(r"([a-z_0-9]+);dur=([0-9.]+)", header)
    return sum(float(ms) for name, ms in steps if name != "total")


def ask(connection: socket.socket, request: bytes) -> tuple[float, float, int]:
    """Returns the milliseconds of a call and of its pass, and the bytes of the answer's body."""
    begun = time.perf_counter()
    connection.sendall(request)
    answer, missing = bytearray(), 1
    while missing > 0:
        part = connection.recv(1 << 20)
        if not part:
            raise SystemExit("the server ended the connection")
        answer += part
        head = answer.find(b"\r\n\r\n")
        if head >= 0:
            told = re.search(rb"content-length: (\d+)", answer[:head], re.IGNORECASE)
            # Long answers are chunked; the last chunk is empty.
            missing = head + 4 + int(told[1]) - len(answer) if told else not answer.endswith(b"\r\n0\r\n\r\n")
    took = (time.perf_counter() - begun) * 1000
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(answer[:1000].decode(errors="replace"))
    timing = re.search(r"server-timing: (.*)", answer[:head].decode())
    return took, passed(timing[1]) if timing else 0.0, len(answer) - head - 4


def request(method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
    lines = {"host": "sterling", "content-type": "application/json", "content-length": str(len(body))} | (headers or {})
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in lines.items()), "", ""]).encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="debian")
    parser.add_argument("--body", default='{"features": {"installed": [832, 835, 3059, 5405]}}', help="a retrieval, without k")
    parser.add_argument("--k", type=int, nargs="+", default=[100, 10_000])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    arguments = parser.parse_args()
    where = urllib.parse.urlsplit(arguments.url)
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    path = f"/v1/models/{arguments.model}:retrieve"
    idle: list[float] = []
    print("| K | form | bytes | call p50, ms | pass p50, ms | adds p50, us | call / pass |")
    print("|---|---|---|---|---|---|---|")
    for k in arguments.k:
        base = json.loads(arguments.body) | {"k": k, "candidates": max(k, 1000), "explain": True}
        requests = {form: request("POST", path, json.dumps(base | FORMS[form][0]).encode(), FORMS[form][1]) for form in arguments.forms}
        taken: dict[str, list[tuple[float, float, int]]] = {form: [] for form in arguments.forms}
        for turn in range(arguments.rounds + 20):
            for form in arguments.forms:
                once = ask(connection, requests[form])
                nothing = ask(connection, request("GET", "/livez"))
                # The first calls warm up client and server.
                if turn >= 20:
                    taken[form].append(once)
                    idle.append(nothing[0] * 1000)
        for form, calls in taken.items():
            call, own = (statistics.median(one[n] for one in calls) for n in (0, 1))
            adds = statistics.median((one[0] - one[1]) * 1000 for one in calls)
            print(f"| {k} | {form} | {calls[-1][2]} | {call:.3f} | {own:.3f} | {adds:.0f} | {call / own:.2f} |")
    print(f"\nA call that does nothing: {statistics.median(idle):.0f} us.")


if __name__ == "__main__":
    main()
