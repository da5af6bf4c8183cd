#!/usr/bin/env python3
"""Rows per second of `sterling score` and of the HTTP route, for the same users of the Debian model.

    [STERLING=...] scripts/bench_score.py

ROWS (50000) users, the held-out ones repeated, in FILES (5) files; SECONDS (20) of each way over HTTP; ROUNDS (3) alternating
rounds; the search for the highest rate starts at RATE (200) per second. Each way uses both cores; over HTTP the server shares them with
the client, so rows per second of the server's CPU time are reported too. The store is loaded before the clock starts.

| way | is |
|---|---|
| `score` | JSON lines to Parquet, `--units -`, one thread per core |
| `score, Parquet` | the same users as Parquet, if PyArrow is installed |
| `http, lists` | CONNECTIONS (4) connections, each with lists of 64 requests at `"priority": "batch"` with a minute of time, one after the other; answers are read, not parsed |
| `http, single` | `sterling bench --find-peak`: single requests, 99 % of them in time |
"""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path

from served import FOLDER, ROOT, STERLING, TICK, Server, bench, finish, header, median, requests_file, row, seconds, store, users, verdict

sys.path.insert(0, str(ROOT / "python"))
from sterling import scoring  # noqa: E402

ROWS = int(os.environ.get("ROWS", 50_000))
FILES = int(os.environ.get("FILES", 5))
ROUNDS = int(os.environ.get("ROUNDS", 3))
CONNECTIONS = int(os.environ.get("CONNECTIONS", 4))
# Start of the search for the highest rate.
RATE = float(os.environ.get("RATE", 200))
BATCH = 64
K = 50
# Minimal ratio of in-process scoring to serving, in rows per second of CPU time.
FASTER_MIN = 1.5


def rows():
    """Returns users with ids."""
    asked = users()
    for n in range(ROWS):
        yield {"id": n, **asked[n % len(asked)]}


def line_files():
    files = [FOLDER / f"users-{n}.jsonl" for n in range(FILES)]
    with contextlib.ExitStack() as stack:
        outs = [stack.enter_context(path.open("w")) for path in files]
        for n, user in enumerate(rows()):
            outs[n * FILES // ROWS].write(json.dumps(user) + "\n")
    return files


def parquet_files():
    """Writes the files of users as Parquet; returns no files without PyArrow."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        return []
    files = []
    for path in sorted(FOLDER.glob("users-*.jsonl")):
        read = [json.loads(line) for line in path.read_text().splitlines()]
        names = sorted({name for user in read for name in user["features"]})
        columns = {"id": [user["id"] for user in read], "exclude": [user["exclude"] for user in read]}
        columns |= {name: [user["features"].get(name) for user in read] for name in names}
        files.append(path.with_suffix(".parquet"))
        pq.write_table(pa.table(columns), files[-1])
    return files


def scored(files, out):
    """Returns rows per second, rows per second of CPU time, peak MB."""
    arguments = scoring.command(files, out, model="debian", store=store(), request={"k": K})
    with scoring.Worker(arguments, program=STERLING) as worker:
        before, start = processor(worker.pid), time.monotonic()
        said = [worker.score(unit) for unit in range(worker.units)]
        took, used = time.monotonic() - start, processor(worker.pid) - before
        peak = int(Path(f"/proc/{worker.pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1e3
    done = sum(one["counts"]["scored"] for one in said)
    if done != ROWS:
        sys.exit(f"{done} of {ROWS} rows were scored: {said}")
    return done / took, done / used, peak


def processor(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def by_lists(server):
    """Returns these figures for lists of requests over some connections."""
    asked = [user | {"k": K, "priority": "batch", "timeout_ms": 60_000} for user in users()]
    lists = [json.dumps({"requests": (asked[n:] + asked[:n])[:BATCH]}).encode() for n in range(0, len(asked), BATCH)]
    end, counts, failed = time.monotonic() + seconds(20), [0] * CONNECTIONS, []

    def ask(which):
        with contextlib.closing(server.connect()) as connection:
            for n in range(1 << 30):
                if time.monotonic() > end:
                    return
                body = lists[(n * CONNECTIONS + which) % len(lists)]
                connection.request("POST", "/v1/models/debian:retrieve", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200 or b'"problem"' in text[:2000]:
                    failed.append(text[:500])
                    return
                counts[which] += BATCH

    before, start = server.stat()[1], time.monotonic()
    threads = [threading.Thread(target=ask, args=(which,)) for which in range(CONNECTIONS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if failed:
        sys.exit(f"a list was not answered: {failed[0]}")
    took, used = time.monotonic() - start, server.stat()[1] - before
    return sum(counts) / took, sum(counts) / used, server.rss_mb()


def by_one(server):
    """Returns these figures for single requests, at the highest rate with 99 % in time, with the CPU time at that rate."""
    asked = requests_file("single", [user | {"k": K} for user in users()])
    step = min(5, seconds(20))
    peak = bench(server.url, "--requests", asked, "--find-peak", "--rate", RATE, "--seconds", step)[-1]["peak"]["rate"]
    if not peak:
        sys.exit(f"{RATE:g} single requests a second are not answered in time: set RATE lower")
    before = server.stat()[1]
    bench(server.url, "--requests", asked, "--rate", peak * 0.95, "--seconds", step)
    return peak, peak * 0.95 * step / (server.stat()[1] - before), server.rss_mb()


def main():
    store()
    files = {"score": line_files(), "score, Parquet": parquet_files()}
    found = {}
    for round in range(ROUNDS):
        for way, inputs in files.items():
            if inputs:
                out = FOLDER / f"out-{way}-{round}".replace(", ", "-")
                found.setdefault(way, []).append(scored(inputs, out))
        with Server(STERLING, store()) as server:
            found.setdefault("http, lists", []).append(by_lists(server))
            found.setdefault("http, single", []).append(by_one(server))
    print(f"{ROWS} rows, K = {K}, medians of {ROUNDS} rounds\n")
    header("way", "rows/s", "rows per second of processor time", "peak MB")
    figures = {way: [median(values) for values in zip(*rounds, strict=True)] for way, rounds in found.items()}
    for way, values in figures.items():
        row(way, *values)
    best = max(figures["http, lists"][1], figures["http, single"][1])
    ratio = figures["score"][1] / best
    verdict(ratio >= FASTER_MIN, f"score does {ratio:.2f} times the rows of the better HTTP way a second of processor time, expected {FASTER_MIN}")
    wall = figures["score"][0] / max(figures["http, lists"][0], figures["http, single"][0])
    print(f"       and {wall:.2f} times its rows a second, where the client takes its share of the same cores")
    finish()


if __name__ == "__main__":
    main()
