#!/usr/bin/env python3
"""Measures the overhead of a router in front of servers.

    STERLING=... [SECONDS=20] [RATE=100] [SHARDS=4] [ITEMS=0] scripts/bench_route.py

At a rate far below the peak, alternating: one server of the complete catalogue; a router over that server, which adds one hop; a
router over SHARDS servers of one shard each, all with one worker. With ITEMS, in addition to the Debian model, that many random
vectors of 128 numbers in 4,096 clusters, top 20. The verdicts: a hop adds at most 150 microseconds to the median, and shards
answer within 1.6 times the median of one server.
"""

import contextlib
import os
import random
import subprocess
import sys

from served import FOLDER, STERLING, Router, Server, bench, finish, header, median, publish, requests_file, row, seconds, store, users, verdict

RATE = float(os.environ.get("RATE", 100))
SHARDS = int(os.environ.get("SHARDS", 4))
ITEMS = int(os.environ.get("ITEMS", 0))
ROUNDS = 5
ONE_WORKER = {"STERLING_ENGINE__WORKERS": "1", "STERLING_AUDIT_SHARE": "0"}


def vectors():
    """Publishes random vectors, complete and in shards; returns the stores and the bodies of the requests."""
    import numpy as np

    path, rng = FOLDER / "vectors-store", np.random.default_rng(1)
    centres = rng.standard_normal((4096, 128), dtype=np.float32)
    items = centres[rng.integers(0, 4096, ITEMS)] + 0.6 * rng.standard_normal((ITEMS, 128), dtype=np.float32)
    np.save(FOLDER / "vectors.npy", items)
    ids = FOLDER / "vectors.jsonl"
    ids.write_text("".join(f'{{"id": {n}}}\n' for n in range(ITEMS)))
    path.mkdir()
    for more in ([], ["--shards", str(SHARDS)]):
        command = [STERLING, "publish", "--name", "vectors", "--items", str(ids), "--vectors", str(FOLDER / "vectors.npy"), "--store", str(path), *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    queries = centres[rng.integers(0, 4096, 500)] + 0.6 * rng.standard_normal((500, 128), dtype=np.float32)
    return path, [{"vector": [round(float(x), 4) for x in query], "k": 20} for query in queries]


def debian():
    path = store()
    if not any((path / "debian").glob("*/shards.json")):
        publish(STERLING, path, ["--shards", str(SHARDS)])
    return path, users()


def run(server, requests, model):
    line = bench(server.url, "--model", model, "--requests", requests, "--rate", RATE, "--seconds", seconds(20) / ROUNDS)[0]
    main = line["classes"][0]
    if main["errors"] + main["other"] + main["timed_out"] + main["no_answer"] or not main["answered_ms"]:
        sys.exit(f"not all was answered: {main}")
    return main["answered_ms"]["p50"], main["answered_ms"]["p99"]


def measure(model, path, bodies):
    requests = requests_file(model, bodies)
    with contextlib.ExitStack() as stack:
        start = lambda *more: stack.enter_context(Server(STERLING, path, "--model", model, *more, environment=ONE_WORKER))
        one = start()
        parts = [start("--shard", str(shard)) for shard in range(SHARDS)]
        servers = {"server": one, "router over it": stack.enter_context(Router([one])), f"router over {SHARDS} shards": stack.enter_context(Router(parts))}
        body = random.Random(1).choice(bodies) | {"probes": 1, "k": 20}
        same = [[item["id"] for item in server.post(f"/v1/models/{model}:retrieve", body)[1]["items"]] for server in servers.values()]
        verdict(same[0] == same[1] == same[2], f"{model}: all answer alike")
        found = {name: [] for name in servers}
        for _ in range(ROUNDS):
            for name, server in servers.items():
                found[name].append(run(server, requests, model))
        p50 = {name: median([p50 for p50, _ in pairs]) for name, pairs in found.items()}
        for name, pairs in found.items():
            row(model, name, RATE, 1000 * p50[name], 1000 * median([p99 for _, p99 in pairs]))
        alone, hop, shards = p50.values()
        verdict(hop - alone <= 0.150, f"{model}: a hop adds {1000 * (hop - alone):.0f} us at the median, expected at most 150")
        verdict(shards <= 1.6 * alone, f"{model}: {SHARDS} shards take {shards / alone:.2f} x the median of one server, expected at most 1.6")
        _, answer = servers[f"router over {SHARDS} shards"].post(f"/v1/models/{model}:retrieve", bodies[0] | {"explain": True})
        print("  one request by rounds, in us:", ", ".join(f"{step['name']} {step['micros']}" for step in answer["explain"]["steps"]))
        for part in answer["explain"]["shards"]:
            print(f"    {part['round']} at shard {part['shard']}: {part['micros']}, of that {sum(s['micros'] for s in part['steps'])} in the pass")


def main():
    header("model", "asked", "rate", "p50 us", "p99 us")
    measure("debian", *debian())
    if ITEMS:
        measure("vectors", *vectors())
    finish()


main()
