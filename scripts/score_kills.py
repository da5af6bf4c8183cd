#!/usr/bin/env python3
"""Kills offline scoring at each of its steps and resumes it: no rows are lost or duplicated, and all bytes equal those of an
undisturbed run.

    STERLING=... scripts/score_kills.py

For each system call that changes files or syncs them to disk, strace kills `sterling score` (SIGKILL) at its Nth call, for N = 1,
2, ... until a run ends before the kill. Calls are counted per thread. After each kill every existing output must be complete;
then the job continues, and its outputs must equal those of an undisturbed run. Needs strace.
"""

import collections
import hashlib
import itertools
import json
import math
import pathlib
import shutil
import subprocess
import sys
import tempfile

from program import STERLING

STEPS = "mkdir mkdirat openat write writev pwrite64 ftruncate fsync fdatasync flock close rename renameat renameat2 link linkat unlink unlinkat".split()
FILES, ROWS, ITEMS = 3, 200, 300


def made(folder):
    """Creates a store with one model, and files of users."""
    items, store = folder / "items.jsonl", folder / "store"
    lines = [{"id": n, "embedding": [math.sin(0.3 * n), math.cos(0.11 * n), n % 7 * 0.1], "attributes": {"size": n % 5}} for n in range(ITEMS)]
    items.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [STERLING, "publish", "--name", "items", "--items", str(items), "--store", str(store)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    inputs = [folder / f"users-{n}.jsonl" for n in range(FILES)]
    for n, path in enumerate(inputs):
        users = [{"id": id, "vector": [math.sin(0.7 * id), math.cos(1.3 * id), 0.25]} for id in range(n * ROWS, (n + 1) * ROWS)]
        # One row per file is invalid, because problems are an output too.
        path.write_text("".join(json.dumps(user) + "\n" for user in users) + "{}\n")
    return [STERLING, "score", "--model", "items", "--in", *map(str, inputs), "--store", str(store), "--request", '{"k": 7, "columns": ["size"]}', "--max-problems", str(FILES)]


def outputs(out):
    paths = [path for path in out.iterdir() if path.name.startswith(("part-", "_part-", "_SUCCESS"))] if out.exists() else []
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def is_killed_at(step, n, command, log):
    """Runs the job until the Nth system call of a kind kills it; returns False if the run ended before that call."""
    trace = ["strace", "-f", "-qq", "-o", str(log), "-e", f"trace={step}", "-e", f"inject={step}:signal=KILL:when={n}"]
    code = subprocess.run([*trace, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
    assert code == 0 or "killed by SIGKILL" in log.read_text(errors="replace"), f"{step} {n}: the run ended with {code}, expected 0 or a kill"
    return code != 0


def main():
    folder = pathlib.Path(tempfile.mkdtemp(prefix="sterling-score-"))
    try:
        command = made(folder)
        subprocess.run([*command, "--out", str(folder / "undisturbed")], check=True, stdout=subprocess.DEVNULL)
        expected = outputs(folder / "undisturbed")
        assert len(expected) == 2 * FILES + 1, expected
        done = collections.Counter()
        for step in STEPS:
            out = folder / step
            job = [*command, "--out", str(out)]
            for n in itertools.count(1):
                if not is_killed_at(step, n, job, folder / "trace"):
                    shutil.rmtree(out)
                    break
                done[step] += 1
                there = outputs(out)
                assert all(expected[name] == digest for name, digest in there.items()), f"{step} {n}: an existing output is not complete"
                again = subprocess.run(job, capture_output=True, text=True)
                assert again.returncode == 0, f"{step} {n}: the job does not resume: {again.stderr[-500:]}"
                assert outputs(out) == expected, f"{step} {n}: got outputs {outputs(out)}, expected {expected}"
                shutil.rmtree(out)
        if not done:
            sys.exit("no run was killed")
        print(f"{done.total()} kills ({', '.join(f'{count} x {step}' for step, count in done.most_common())}): every resumed job wrote the bytes of an undisturbed one")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


main()
