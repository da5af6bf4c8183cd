#!/usr/bin/env python3
"""Compares the time of the reranker in the server with the time of the same step alone.

    STERLING=... [BENCH_FORWARD=...] scripts/bench_step.py

For each held-out user in turn, the server gets a request with `explain`, which reports the step `overarch`. Then
`benches/forward.rs` repeats that step alone over the same candidates, on one thread, and then complete retrievals, back to back
and after pauses of 2 ms in which the bench reads 8 MiB of other memory, like a server that waits for its client. Reports medians over
USERS (200) users. BENCH_FORWARD is the built bench, by default the newest target/release/deps/forward-* (`cargo bench --bench
forward --no-run`).
"""

import contextlib
import os
import subprocess
import sys

from served import ROOT, STERLING, Server, finish, header, median, row, store, users, verdict

USERS = int(os.environ.get("USERS", 200))
SLOWER_MAX = 1.10
STEP = "overarch"


def built():
    """Returns the path of the built bench."""
    if "BENCH_FORWARD" in os.environ:
        return os.environ["BENCH_FORWARD"]
    found = [path for path in (ROOT / "target/release/deps").glob("forward-*") if not path.suffix and os.access(path, os.X_OK)]
    if not found:
        sys.exit("no target/release/deps/forward-*: run `cargo bench --bench forward --no-run`")
    return str(max(found, key=lambda path: path.stat().st_mtime))


class Alone:
    """The bench process, which receives the candidates of one user at a time."""

    def __init__(self, version):
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([built(), "--turns", str(version)], stdin=pipe, stdout=pipe, text=True)
        self.kernel = self.line()

    def line(self):
        return self.process.stdout.readline().strip() or sys.exit("the bench ended")

    def micros(self, user):
        self.process.stdin.write(f"{user}\n")
        self.process.stdin.flush()
        return [float(micros) for micros in self.line().split()]

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def in_server(server, body, connection):
    _, answer = server.retrieve(body | {"explain": True}, connection)
    return next(float(step["micros"]) for step in answer["explain"]["steps"] if step["name"] == STEP)


def compare(server, alone, bodies):
    """Returns the microseconds of the reranker per user: in the server, alone, in a retrieval, and in a retrieval after a pause. The bench is idle while
    the server is measured."""
    pairs = []
    with contextlib.closing(server.connect()) as connection:
        for number, body in enumerate(bodies):
            # Only the second answer is measured: the first request wakes the worker.
            in_server(server, body, connection)
            pairs.append((in_server(server, body, connection), *alone.micros(number)))
    return pairs


def main():
    bodies = users()[:USERS]
    path = store()
    with Server(STERLING, path) as server:
        _, info = server.retrieve(bodies[0])
        alone = Alone(path / "debian" / str(info["version"]))
        pairs = compare(server, alone, bodies)
        alone.end()
    inside, outside, in_pass, paused = (median(times) for times in zip(*pairs))
    header("users", "in the server µs", "alone µs", "in a pass µs", "after a pause µs", "server / alone", "server / paused", "median of server / alone")
    row(len(pairs), inside, outside, in_pass, paused, inside / outside, inside / paused, median([a / b for a, b, *_ in pairs]))
    verdict(inside <= SLOWER_MAX * outside, f"{alone.kernel}: the step in the server takes {inside / outside:.3f} times its time alone, expected at most {SLOWER_MAX}")
    finish()


main()
