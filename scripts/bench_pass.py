#!/usr/bin/env python3
"""Detects slower requests: search alone and the complete pass, alternating with an older binary (PEER).

    STERLING=... PEER=... scripts/bench_pass.py

ROUNDS (5) rounds; ITEMS (200000) random items of 64 numbers in clusters, for `ann-bench`. Reports medians over rounds and their
ratios to the peer.
"""

import array
import json
import math
import os
import random
import subprocess
import time

from served import FOLDER, PEER, Server, binaries, finish, header, median, row, store, users, verdict, wait

ITEMS = int(os.environ.get("ITEMS", 200_000))
ROUNDS = int(os.environ.get("ROUNDS", 5))
WIDTH = 64
QUERIES = 200
# Allowed slowdown: two runs of one binary differ by as much.
SLOWER_MAX = 1.03


def npy(name, descr, typecode, rows, cols, values):
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {cols}), }}\n".encode()
    with (FOLDER / name).open("wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + array.array(typecode, values).tobytes())
    return str(FOLDER / name)


def vectors(count, centres, spread, generator):
    """Returns normalized rows around centres."""
    for _ in range(count):
        line = [x + spread * generator.gauss(0, 1) for x in generator.choice(centres)]
        length = math.sqrt(sum(x * x for x in line))
        yield from (x / length for x in line)


def search_files():
    """Returns the arguments of `ann-bench`. Recall is measured elsewhere, so the ground truth is empty."""
    generator = random.Random(1)
    centres = [[generator.gauss(0, 1) for _ in range(WIDTH)] for _ in range(1000)]
    none = npy("truth.npy", "<i4", "i", QUERIES, 1000, [-1] * QUERIES * 1000)
    for name in ("third", "rare"):
        npy(f"truth_{name}.npy", "<i4", "i", QUERIES, 1000, [-1] * QUERIES * 1000)
    attributes = (n for _ in range(ITEMS) for n in (generator.randrange(3), generator.randrange(500)))
    filters = FOLDER / "filters.json"
    filters.write_text(json.dumps({"third": {"expression": "f0:1"}, "rare": {"expression": "f1:7 OR f1:9 AND NOT f0:2"}}))
    return [
        "--items", npy("items.npy", "<f4", "f", ITEMS, WIDTH, vectors(ITEMS, centres, 0.4, generator)),
        "--queries", npy("queries.npy", "<f4", "f", QUERIES, WIDTH, vectors(QUERIES, centres, 0.4, generator)),
        "--truth", none, "--attributes", npy("attributes.npy", "<i2", "h", ITEMS, 2, attributes), "--filters", str(filters),
        "--queries-count", "0", "--lists", "1000", "--probes", "16,64", "--k", "100", "--rescore", "f16",
    ]  # fmt: skip


def search(binary, files, batch):
    """Returns the median milliseconds of queries by filter and probes."""
    done = subprocess.run([binary, "ann-bench", *files, "--batch", str(batch)], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    name = lambda line: f"search, {line['filter'] or 'no filter'}, P = {line['probes']}, batch {batch}"
    return {name(line): 1000 / line["qps"] for line in lines if "qps" in line}


def passes(server):
    """Returns the milliseconds of a request over one connection: the steps of the server, and the total."""
    kinds = {
        "defaults": {},
        "filter section:python": {"filter": "section:python"},
        "filter, a number and NOT": {"filter": "NOT section:libs AND installed_kb < 100"},
        "K0 = 100": {"candidates": 100},
        "K = 1000, K0 = 10,000": {"k": 1000, "candidates": 10_000},
        "exact": {"exact": True},
    }
    asked, connection, found = users()[::8], server.connect(), {}
    for name, more in kinds.items():
        bodies = [body | more | {"explain": True, "timeout_ms": 60_000} for body in (asked if more != kinds["K = 1000, K0 = 10,000"] else asked[::4])]
        steps, whole = [], []
        for body in bodies[:20] + bodies:
            start = time.perf_counter()
            status, answer = server.retrieve(body, connection)
            whole.append((time.perf_counter() - start) * 1000)
            assert status == 200, answer
            steps.append(sum(step["micros"] for step in answer["explain"]["steps"]) / 1000)
        found[f"pass, {name}"] = median(steps[20:])
        found[f"over HTTP, {name}"] = median(whole[20:])
    for candidates in (None, 100):
        fields = {"timeout_ms": 60_000} | ({"candidates": candidates} if candidates else {})
        times = []
        for first in range(0, 640, 32):
            body = {"requests": [user | fields for user in users()[first : first + 32]]}
            start = time.perf_counter()
            status, answer = server.retrieve(body, connection)
            times.append((time.perf_counter() - start) * 1000 / 32)
            assert status == 200 and not any("problem" in result for result in answer["results"]), answer
        found[f"over HTTP, a list of 32, K0 = {candidates or 'default'}"] = median(times)
    return found


def searches(server):
    """Returns the milliseconds of the steps of a request with a vector: the search as it is served."""
    data = array.array("f", (FOLDER / "queries.npy").read_bytes()[-QUERIES * WIDTH * 4 :])
    connection, found = server.connect(), {}
    for probes in (16, 64):
        steps = []
        for first in [*range(0, QUERIES * WIDTH, WIDTH)] * 3:
            fields = {"k": 100, "candidates": 100, "probes": probes, "explain": True, "timeout_ms": 60_000}
            status, answer = server.post("/v1/models/vectors:retrieve", {"vector": list(data[first : first + WIDTH])} | fields, connection)
            assert status == 200, answer
            steps.append(sum(step["micros"] for step in answer["explain"]["steps"]) / 1000)
        found[f"served search, no filter, P = {probes}"] = median(steps[QUERIES:])
    return found


def main():
    files = search_files()
    # Each binary serves its own publication, because formats may differ.
    stores = {name: store(binary, name) for name, binary in binaries().items()}
    ids = FOLDER / "ids.jsonl"
    ids.write_text("".join(f'{{"id": {n}}}\n' for n in range(ITEMS)))
    for name, binary in binaries().items():
        items = ["--name", "vectors", "--items", str(ids), "--vectors", str(FOLDER / "items.npy")]
        subprocess.run([binary, "publish", *items, "--store", str(stores[name])], check=True, stdout=subprocess.DEVNULL)
    rounds = {name: [] for name in binaries()}
    for _ in range(ROUNDS):
        for name, binary in binaries().items():
            found = search(binary, files, 1) | search(binary, files, 32)
            with Server(binary, stores[name]) as server:
                served = lambda: {server.get(f"/v1/models/{model}")[0] for model in ("vectors", "debian")}
                wait("both models are served", lambda: served() == {200})
                rounds[name].append(found | searches(server) | passes(server))
    header("median ms", "sterling", "peer", "ratio")
    for figure in rounds["sterling"][0]:
        own, *peer = [median([found[figure] for found in rounds[name]]) for name in rounds]
        if not peer:
            row(figure, f"{own:.4f}", "", "")
            continue
        row(figure, f"{own:.4f}", f"{peer[0]:.4f}", f"{own / peer[0]:.3f}")
        if own > peer[0] * SLOWER_MAX:
            verdict(False, f"{figure}: {own / peer[0]:.3f} times the peer's, at most {SLOWER_MAX} is allowed")
    verdict(True, f"every other request is within {SLOWER_MAX} of the peer" if PEER else "no peer: nothing is compared")
    finish()


main()
