#!/usr/bin/env python3
"""Measures publications with vectors in memory and on disk.

    [STERLING=...] [N=2000000] [MEMORY=6GiB] [WAYS=memory,disk] scripts/bench_publish.py

N (2,000,000) clustered vectors of D (64) numbers, made once from SEED (1) in chunks and stored in DATA (a temporary folder) as
`.npy` of TYPE (f2: 2 D bytes per item; or f4), with ids as Parquet. Needs NumPy, PyArrow, and disk space for vectors, ids and
one version (all but the last are removed).

| way | is |
|---|---|
| `memory` | without `--memory`: vectors in memory, if there is enough |
| `disk` | `--memory MEMORY` |

A publication is sampled every 20 ms. `own` is anonymous memory (RssAnon), which `--memory` limits; `mapped` is mapped file pages
(RssFile), which the system reclaims when it needs memory. Phases are recognized by the content of the version's folder. If both
ways run, their files must be equal. RECALL (200) perturbed items are then sent to a server of the last version, and the results are
compared with the exact answer over all stored vectors; RECALL=0 skips this comparison.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from served import FOLDER, STERLING, Server, finish, header, row, verdict

N = int(os.environ.get("N", 2_000_000))
D = int(os.environ.get("D", 64))
SEED = int(os.environ.get("SEED", 1))
TYPE = os.environ.get("TYPE", "f2")
MEMORY = os.environ.get("MEMORY", "6GiB")
WAYS = os.environ.get("WAYS", "memory,disk").split(",")
RECALL = int(os.environ.get("RECALL", 200))
DATA = Path(os.environ.get("DATA", FOLDER))
STORE = Path(os.environ.get("STORE", FOLDER / "store"))
CHUNK = 1 << 18
K = 100
UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 1 << 20, "GiB": 1 << 30}


def vectors(first, count, centres):
    """Returns rows of the catalogue: a centre sampled from a power law, plus noise of half its length."""
    random = np.random.default_rng([SEED, first])
    of = (len(centres) * random.random(count) ** 2).astype(np.int64)
    rows = centres[of] + 0.5 * random.standard_normal((count, D), dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make():
    """Writes the files of vectors and ids, unless they exist; incomplete files have a temporary name."""
    matrix, items = DATA / f"vectors-{N}-{D}-{TYPE}-{SEED}.npy", DATA / f"ids-{N}.parquet"
    DATA.mkdir(parents=True, exist_ok=True)
    if not matrix.exists():
        centres = np.random.default_rng(SEED).standard_normal((max(N // 500, 16), D), dtype=np.float32)
        begun = matrix.with_suffix(".part")
        with begun.open("wb") as out:
            np.lib.format.write_array_header_1_0(out, {"descr": f"<{TYPE}", "fortran_order": False, "shape": (N, D)})
            for first in range(0, N, CHUNK):
                out.write(vectors(first, min(CHUNK, N - first), centres).astype(f"<{TYPE}").tobytes())
        begun.rename(matrix)
    if not items.exists():
        begun = items.with_suffix(".part")
        with pq.ParquetWriter(begun, pa.schema([("id", pa.int64())])) as out:
            for first in range(0, N, 1 << 20):
                out.write_table(pa.table({"id": np.arange(first, min(first + (1 << 20), N), dtype=np.int64) * 7}))
        begun.rename(items)
    return matrix, items


def memory_of(process):
    """Returns the bytes of anonymous memory and of mapped files of a process; None once it has ended."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = dict(re.findall(r"^(RssAnon|RssFile):\s+(\d+) kB", text, re.M))
    return [int(found[name]) * 1024 for name in ("RssAnon", "RssFile")] if len(found) == 2 else None


def phase(told):
    """Returns the current phase of a publication, from its output and its files."""
    staging = next((STORE / "m").glob(".publishing-*"), None)
    try:
        names = [path.name for path in staging.iterdir()] if staging else []
    except FileNotFoundError:
        return "done"
    for found, name in (
        ("filter.safetensors", "calibrate"),
        ("index.safetensors", "columns"),
        (".index.safetensors", "write"),
    ):
        if any(other.startswith(found) for other in names):
            return name
    return "train, assign" if told else "read"


def publish(way, matrix, items):
    """Publishes a version, and returns time and memory by phase."""
    command = [STERLING, "publish", "--name", "m", "--items", str(items), "--vectors", str(matrix), "--store", str(STORE)]
    command += ["--memory", MEMORY] if way == "disk" else []
    start = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    told, said = [], []

    def listen():
        for line in process.stderr:
            said.append(line)
            if line.startswith("memory: "):
                told.append(line.strip())

    listener = threading.Thread(target=listen)
    listener.start()
    spent, peaks, last = {}, [0, 0], start
    while process.poll() is None:
        now, at, sample = time.monotonic(), phase(told), memory_of(process)
        spent[at], last = spent.get(at, 0) + now - last, now
        if sample:
            peaks = [max(pair) for pair in zip(peaks, sample)]
        time.sleep(0.02)
    listener.join()
    if process.returncode != 0:
        sys.exit(f"{way}: {''.join(said)}")
    print(f"{way}: {told[0]}", flush=True)
    return spent, peaks, time.monotonic() - start


def manifest():
    versions = sorted((int(path.name) for path in (STORE / "m").iterdir() if path.name.isdigit()), reverse=True)
    folder = STORE / "m" / str(versions[0])
    return folder, json.loads((folder / "manifest.json").read_text())


def recall(matrix):
    """Returns the recall@K of a server at its default probes."""
    rows = np.load(matrix, mmap_mode="r")
    random = np.random.default_rng(SEED + 1)
    queries = np.stack([rows[n] for n in random.integers(0, N, RECALL)]).astype(np.float32)
    queries += 0.1 * random.standard_normal(queries.shape, dtype=np.float32) / np.sqrt(D)
    best = np.full((RECALL, K), -np.inf, np.float32)
    ids = np.zeros((RECALL, K), np.int64)
    for first in range(0, N, CHUNK):
        scores = queries @ np.asarray(rows[first : first + CHUNK], np.float32).T
        scores, numbers = np.concatenate([best, scores], 1), np.arange(first, first + scores.shape[1]) * 7
        numbers = np.concatenate([ids, np.broadcast_to(numbers, (RECALL, len(numbers)))], 1)
        top = np.argpartition(-scores, K, 1)[:, :K]
        best, ids = np.take_along_axis(scores, top, 1), np.take_along_axis(numbers, top, 1)
    found = 0
    with Server(STERLING, STORE) as server:
        for query, wanted in zip(queries, ids):
            status, got = server.post("/v1/models/m:retrieve", {"vector": query.tolist(), "k": K})
            if status != 200:
                sys.exit(f"{status}: {got}")
            found += len({item["id"] for item in got["items"]} & set(wanted.tolist()))
    return found / (RECALL * K)


def main():
    matrix, items = make()
    STORE.mkdir(parents=True, exist_ok=True)
    lines, files = [], []
    for n, way in enumerate(WAYS):
        spent, (own, mapped), total = publish(way, matrix, items)
        folder, what = manifest()
        files.append(what["files"])
        phases = ", ".join(f"{name} {took:.0f}" for name, took in spent.items() if name != "done")
        lines.append((way, f"{total:.0f}", f"{N / total:,.0f}", f"{own / 2**30:.2f}", f"{mapped / 2**30:.2f}", phases))
        if n + 1 < len(WAYS):
            shutil.rmtree(folder)
    header("way", "s", "items/s", "own GiB", "mapped GiB", "s by phase")
    for line in lines:
        row(*line)
    if RECALL:
        print(f"recall@{K}: {recall(matrix):.4f} over {RECALL} queries")
    number, unit = re.fullmatch(r"([\d.]+)\s*([A-Za-z]+)", MEMORY).groups()
    for way, *_, own, _, _ in lines:
        if way == "disk":
            verdict(float(own) * 2**30 <= float(number) * UNITS[unit], f"{own} GiB of own memory, at most the limit {MEMORY}")
    if len(files) > 1:
        verdict(all(other == files[0] for other in files), "the same files from memory and from the disk")
    finish()


if __name__ == "__main__":
    main()
