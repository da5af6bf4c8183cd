"""Quality of managed ids: trains on a stream with ten times as many users as the table has rows, and prints the table of
docs/benchmarks/training.md.

    pip install torch onnx onnxscript safetensors numpy && pip install ./python
    python scripts/evaluate_managed.py [STERLING]

STERLING is the program, by default target/release/sterling. Users are drawn by Zipf 1.05, and the ranks drift: which users are frequent
changes all the time. A user has one of 12 tastes; 80 % of the clicks follow the taste, and the others are on popular items. The user tower knows only the
user's id. Each event is ranked before it is trained on. Three models differ in the table of users:

- all: a row for each user, and no managed ids;
- managed: a tenth of the rows, with each eviction policy;
- hashed: a tenth of the rows, and ids share rows by their hash.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from sterling import Ids, Table, export
from torch import nn

USERS, ROWS, ITEMS, TASTES, EVENTS, D = 10_000, 1_000, 240, 12, 60_000, 16
# Number of events after which one user becomes frequent and the least frequent of the frequent users becomes rare.
DRIFT = 200
FREE = -(2**63)
TRAIN = """
[train]
label = "click"
batch = 32
uniform = 32
temperature = 0.5
dense = ["user"]
optimizer = { kind = "adagrad", rate = 0.3 }
"""


class User(nn.Module):
    """Computes a query from the row of a user; the query of an unknown user is the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(D))

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        return self.layer(user)


class Item(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Returns 64-bit ids, computed by SplitMix64."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype(np.int64)


def stream(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the user numbers and the items of all events."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, USERS + 1) ** 1.05
    ranks = random.choice(USERS, EVENTS, p=shares / shares.sum())
    order = random.permutation(USERS)
    users = order[(ranks + np.arange(EVENTS) // DRIFT) % USERS]
    popular = 1 / np.arange(1, ITEMS + 1)
    taste = random.integers(TASTES, size=USERS)[users]
    own = taste * (ITEMS // TASTES) + random.integers(ITEMS // TASTES, size=EVENTS)
    any_item = random.permutation(ITEMS)[random.choice(ITEMS, EVENTS, p=popular / popular.sum())]
    return users, np.where(random.random(EVENTS) < 0.8, own, any_item)


def package(folder: Path, table: Table, managed: str) -> None:
    torch.manual_seed(1)
    items = torch.randn(ITEMS, D) / D**0.5
    export(
        folder, user=User(), item=Item(), tables={"users": table, "items": items}, items=[{"id": n} for n in range(ITEMS)],
        features={"user": [Ids("user", "users")], "item": [Ids("rows", "items", column="id")]}, samples=[{"user": [1]}],
    )  # fmt: skip
    with open(folder / "model.toml", "a") as model:
        model.write(TRAIN + (f'[[train.tables]]\nname = "users"\nmanaged = {managed}\n' if managed else ""))


def learned(program: str, folder: Path, events: Path) -> dict:
    done = subprocess.run([program, "train", folder, "--events", events, "--out", f"{folder}.out"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    program = sys.argv[1] if len(sys.argv) > 1 else "target/release/sterling"
    users, items = stream(1)
    ids = mixed(np.arange(USERS))
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        files = {}
        for name, of_user in [("numbers", np.arange(USERS)), ("ids", ids)]:
            files[name] = root / f"{name}.jsonl"
            lines = [{"user": {"user": [int(of_user[user])]}, "item": int(item), "labels": {"click": 1}} for user, item in zip(users, items)]
            files[name].write_text("".join(json.dumps(line) + "\n" for line in lines))
        initial = lambda rows: (torch.rand(rows, D, generator=torch.Generator().manual_seed(2)) * 2 - 1) / rows**0.5  # noqa: E731
        empty = Table(torch.zeros(ROWS, D), ids=torch.full((ROWS,), FREE))
        cases = [("all", Table(initial(USERS)), "", "numbers"), ("hashed", Table(initial(ROWS), unseen="hash"), "", "ids")]
        for evict, more in [("distance_lfu", ", exponent = 0.3"), ("distance_lfu", ""), ("lru", ""), ("lfu", "")]:
            cases.append((f"managed, `{evict}`{more}", empty, f'{{ evict = "{evict}", every = 10{more} }}', "ids"))
        print("| table of users | rows | NDCG@10 | beside all | beside hashed |\n|---|---|---|---|---|")
        ndcg: dict[str, float] = {}
        for name, table, managed, events in cases:
            folder = root / f"case{len(ndcg)}"
            package(folder, table, managed)
            report = learned(program, folder, files[events])
            ndcg[name] = report["learned"]["ndcg@10"]
            beside = ["" if other not in ndcg else f"{100 * (ndcg[name] / ndcg[other] - 1):+.1f} %" for other in ("all", "hashed")]
            print(f"| {name} | {len(table.weight)} | {ndcg[name]:.4f} | {' | '.join(beside)} |", flush=True)


if __name__ == "__main__":
    main()
