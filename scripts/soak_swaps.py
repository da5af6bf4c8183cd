#!/usr/bin/env python3
"""Swaps versions under load and checks every answer.

    STERLING=... [SECONDS=30] [ACTIVATIONS=1000] [RATE=100] scripts/soak_swaps.py

Two versions with different scores are activated alternately, with 30 swaps and rollbacks, while `sterling bench` counts and times
requests and two readers compare every answer with the answer of its version alone. ACTIVATIONS activations follow; memory and file
descriptors must stay at the values before them.
"""

import os
import re
import shutil
import threading
import time

from served import FOLDER, ROOT, STERLING, Server, bench, finish, header, publish, requests_file, row, seconds, users, verdict

SWAPS = 30
ACTIVATIONS = int(os.environ.get("ACTIVATIONS", 1000))
RATE = float(os.environ.get("RATE", 100))
# Other requests in a batch change the last bits of a query.
TOLERANCE = 1e-3


def two_versions():
    """Returns a store of two versions with different value models."""
    path = FOLDER / "store"
    path.mkdir()
    publish(STERLING, path)
    other = FOLDER / "package"
    # Without recorded requests, whose answers belong to the other value model.
    shutil.copytree(ROOT / "models/debian", other, ignore=shutil.ignore_patterns("warmup.jsonl"))
    model = (other / "model.toml").read_text()
    (other / "model.toml").write_text(re.sub(r"w_similarity = [\d.]+", "w_similarity = 1.0", model))
    publish(STERLING, path, package=other)
    return path


def activate(server, version, connection=None):
    status, answer = server.post(f"/v1/models/debian/versions/{version}:activate", None, connection)
    if status != 200:
        raise SystemExit(f"version {version} was not activated: {status} {answer}")


def scores(answer):
    return [item["score"] for item in answer["items"]]


class Reader(threading.Thread):
    """Sends requests in a loop, and counts answers that fail or do not match the version that they name."""

    def __init__(self, server, bodies, expected, number):
        super().__init__(daemon=True)
        self.server, self.bodies, self.expected, self.number = server, bodies, expected, number
        self.asked, self.failed, self.mixed, self.stopped = 0, 0, 0, False
        self.start()

    def run(self):
        connection = self.server.connect()
        while not self.stopped:
            place = (self.asked * 2 + self.number) % len(self.bodies)
            status, answer = self.server.retrieve(self.bodies[place], connection)
            self.asked += 1
            if status != 200:
                self.failed += 1
                continue
            expected = self.expected[answer["version"]]
            close = [abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(scores(answer), expected["scores"][place])]
            self.mixed += answer["digest"] != expected["digest"] or len(close) != len(expected["scores"][place]) or not all(close)
            # Reads often enough to see every swap; the load comes from the generator.
            time.sleep(0.02)


def expectations(server, bodies):
    found = {}
    for version in (1, 2):
        activate(server, version)
        answers = [server.retrieve(body)[1] for body in bodies]
        assert {answer["version"] for answer in answers} == {version}
        found[version] = {"digest": answers[0]["digest"], "scores": [scores(answer) for answer in answers]}
    assert found[1]["digest"] != found[2]["digest"] and found[1]["scores"] != found[2]["scores"]
    return found


def main():
    requests = requests_file("users", users())
    load = ["--requests", requests, "--rate", RATE, "--seconds", seconds(30)]
    with Server(STERLING, two_versions()) as server:
        bodies = [body | {"timeout_ms": 10_000} for body in users()[:200:2]]
        expected = expectations(server, bodies)
        readers = [Reader(server, bodies, expected, number) for number in range(2)]
        bench(server.url, *load)
        steady = bench(server.url, *load)[0]

        done = threading.Event()

        def swap():
            for number in range(SWAPS):
                activate(server, 1 + number % 2)
                time.sleep(seconds(30) / SWAPS)
            done.set()

        threading.Thread(target=swap, daemon=True).start()
        swapping = bench(server.url, *load)[0]
        done.wait(60)
        for reader in readers:
            reader.stopped = True
        for reader in readers:
            reader.join()

        connection = server.connect()
        for number in range(20):
            activate(server, 1 + number % 2, connection)
        time.sleep(2)
        before = server.rss_mb(), server.descriptors()
        start = time.time()
        for number in range(ACTIVATIONS):
            activate(server, 1 + number % 2, connection)
            if number % 20 == 0:
                server.retrieve(bodies[number % len(bodies)], connection)
        took = time.time() - start
        time.sleep(2)
        after = server.rss_mb(), server.descriptors()

    steady_class, swapping_class = steady["classes"][0], swapping["classes"][0]
    header("load", "requests", "answered in time", "p50 ms", "p99 ms", "max ms", "void")
    for name, line in ((f"steady, {RATE:.0f}/s", steady), (f"{SWAPS} swaps", swapping)):
        main_class, ms = line["classes"][0], line["classes"][0]["answered_ms"]
        row(name, main_class["requests"], main_class["ok"], ms["p50"], ms["p99"], ms["max"], line["void"] or "")
    header(f"{ACTIVATIONS} activations", "MB", "descriptors")
    row("before", *before)
    row(f"after, {took / max(1, ACTIVATIONS) * 1000:.1f} ms each", *after)
    asked, failed, mixed = (sum(getattr(reader, name) for reader in readers) for name in ("asked", "failed", "mixed"))
    failures = swapping_class["requests"] - swapping_class["ok"] + failed
    ratio = swapping_class["answered_ms"]["p99"] / steady_class["answered_ms"]["p99"]
    verdict(failures == 0, f"{failures} of {swapping_class['requests'] + asked} requests failed during the swaps, expected 0")
    verdict(mixed == 0, f"{mixed} of {asked} answers differ from the answers of their version alone, expected 0")
    verdict(ratio <= 1.2, f"p99 during swaps {ratio:.2f} x of steady, expected at most 1.2 x")
    verdict(after[0] <= before[0] * 1.02 + 1, f"memory after {ACTIVATIONS} activations {after[0]:.1f} MB, before {before[0]:.1f}, expected no more than 2 % and 1 MB of growth")
    verdict(after[1] <= before[1], f"descriptors after {ACTIVATIONS} activations {after[1]}, before {before[1]}, expected no more")
    finish()


main()
