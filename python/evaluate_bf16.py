"""What bf16 does to the Debian model's reranker: python/evaluate_bf16.py BENCH [--users 400]

BENCH is the built bench (cargo bench --bench dense --no-run; target/release/deps/dense-*). The best 1000 candidates of held-out users by exact
search, vectors by onnxruntime, are scored by programs in f32 and in bf16. Prints the largest difference of a logit, how much of the top 20 is
the same, and recall@20 of both.

Needs what evaluate_debian.py needs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from debian_data import recall, top_k, without_history
from evaluate_debian import Package

CANDIDATES, TOP = 1000, 20
COLUMNS = ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bench")
    parser.add_argument("--users", type=int, default=400)
    arguments = parser.parse_args()
    package = Package(Path(__file__).resolve().parent.parent / "models" / "debian")
    requests = [json.loads(line) for line in open(package.folder / "heldout.jsonl")][: arguments.users]
    items = package.items()["item"]
    query = package.queries([request["features"] for request in requests])
    similarity = without_history(query @ items.T, [request["exclude"] for request in requests])
    candidates = top_k(similarity, CANDIDATES)
    columns = [np.asarray(package.columns[name], np.float32)[candidates][..., None] for name in COLUMNS]
    rows = np.concatenate([items[candidates], *columns], -1).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        query.astype(np.float32).tofile(f"{folder}/queries.f32")
        rows.tofile(f"{folder}/rows.f32")
        subprocess.run([arguments.bench, "--score", folder], check=True)
        logits = {way: np.fromfile(f"{folder}/{way}.logits", np.float32).reshape(len(requests), CANDIDATES, -1) for way in ("f32", "bf16")}
    own = np.take_along_axis(similarity, candidates, 1).astype(np.float64)
    top = {}
    for way, values in logits.items():
        value = package.value(1 / (1 + np.exp(-values.astype(np.float64))), own)
        best = np.argsort(-value, 1, kind="stable")[:, :TOP]
        top[way] = np.take_along_axis(candidates, best, 1)
    same = np.mean([len(set(a) & set(b)) / TOP for a, b in zip(top["f32"], top["bf16"])])
    print(f"{len(requests)} users: largest difference of a logit {np.abs(logits['f32'] - logits['bf16']).max():.4f}, top {TOP} the same {same:.4f}")
    print(", ".join(f"recall@{TOP} in {way} {recall(top[way], [set(r['held']) for r in requests], TOP):.4f}" for way in logits))


if __name__ == "__main__":
    main()
