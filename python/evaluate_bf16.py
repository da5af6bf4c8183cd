"""Effect of bf16 on the answers of the Debian model: python/evaluate_bf16.py [--program PROGRAM] [--users 2086]

Publishes and serves the package twice, once unchanged and once with `precision = "bf16"`, on a processor with AMX, or of AMD with
AVX-512 BF16. The held-out users are requests to both, by exact search with 1000 candidates. Prints the largest difference of a
task's score, the overlap of the top 20, and recall@20 of both. Needs the Python package with its client (pip install
'./python[client]') and the built program.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import sterling

CANDIDATES, TOP = 1000, 20
PACKAGE = Path(__file__).resolve().parent.parent / "models" / "debian"


def answers(package: Path, users: list[dict], program: str | None) -> list[sterling.Ranked]:
    """Returns the answers of a server of the package to these users."""
    with tempfile.TemporaryDirectory() as store:
        print(sterling.publish(package, store, program=program).said)
        with sterling.serve(store, program=program) as server, sterling.Client(server.url) as client:
            fields = {"k": TOP, "candidates": CANDIDATES, "exact": True, "timeout_ms": 60000}
            return [client.retrieve("debian", features=user["features"], exclude=user["exclude"], **fields) for user in users]


def in_bf16(folder: Path) -> Path:
    """Returns a copy of the package that computes in bf16."""
    package = folder / "debian"
    # The recorded answers are those of f32, which would fail the warm-up.
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("warmup.jsonl"))
    text = (package / "model.toml").read_text()
    (package / "model.toml").write_text(text.replace('name = "debian"\n', 'name = "debian"\nprecision = "bf16"\n', 1))
    return package


def difference(single: sterling.Ranked, half: sterling.Ranked) -> float:
    """Returns the largest difference of a task's score, over the items that both have."""
    _, a, b = np.intersect1d(single.ids, half.ids, return_indices=True)
    return max(float(np.abs(scores[a] - half.tasks[task][b]).max(initial=0)) for task, scores in single.tasks.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program")
    parser.add_argument("--users", type=int)
    options = parser.parse_args()
    users = [json.loads(line) for line in open(PACKAGE / "heldout.jsonl")][: options.users]
    single = answers(PACKAGE, users, options.program)
    with tempfile.TemporaryDirectory() as folder:
        half = answers(in_bf16(Path(folder)), users, options.program)
    same = np.mean([len(np.intersect1d(a.ids, b.ids)) / TOP for a, b in zip(single, half)])
    print(f"{len(users)} users: top {TOP} the same {same:.4f}, largest difference of a task's score {max(map(difference, single, half)):.4f}")
    for name, found in (("f32", single), ("bf16", half)):
        shares = [len(set(one.ids.tolist()) & set(user["held"])) / min(TOP, len(user["held"])) for one, user in zip(found, users)]
        print(f"recall@{TOP} in {name} {np.mean(shares):.4f}")


if __name__ == "__main__":
    main()
