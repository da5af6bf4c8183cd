"""Writes golden training runs: python/make_steps_golden.py [OUT=tests/golden/train/steps.json]

PyTorch takes 500 steps on the package of tests/golden/tiny in f64: softmax over the items of each batch, row-wise Adagrad on the tables, by
the formula of FBGEMM's EXACT_ROWWISE_ADAGRAD, and `torch.optim.Adam` on the weights of both towers. OUT holds the mean loss after some numbers
of steps, and tables and weights after the last one, as in python/make_grad_golden.py. Needs numpy, onnx, safetensors and torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from make_grad_golden import ROOT, digits, run
from onnx import numpy_helper
from safetensors.torch import load_file

PACKAGE = ROOT / "tests/golden/tiny"
BATCH, TEMPERATURE, RATE, EPSILON = 16, 0.2, 0.1, 1e-8
# Unit length makes some gradients exactly 0, which in f32 are noise. Adam would make steps of full size of it without an epsilon above it.
DENSE = {"lr": 0.001, "eps": 1e-4}
AFTER = [100, 250, 500]


def event(n: int) -> tuple[int, int]:
    """Returns the package that user `n` has installed, and the next one, which the user takes, as crates/train/src/tests.rs does."""
    had = (n * 7 + n // 11) % 11
    return had, had + 1


class Tower:
    """One tower: its graph, and its weights as leaves."""

    def __init__(self, name: str):
        self.graph = onnx.load(PACKAGE / f"{name}.onnx").graph
        tensors = {t.name: torch.from_numpy(np.array(numpy_helper.to_array(t))) for t in self.graph.initializer}
        # An epsilon is a constant.
        self.weights = {n: t.double().requires_grad_() for n, t in tensors.items() if t.dtype == torch.float32 and t.numel() > 1}

    def __call__(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs, _ = run(self.graph, inputs, self.weights)
        return next(iter(outputs.values()))


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/train/steps.json")
    tables = {name: rows.double().requires_grad_() for name, rows in load_file(PACKAGE / "tables.safetensors").items()}
    state = {name: torch.zeros(len(rows), dtype=torch.float64) for name, rows in tables.items()}
    user, item = Tower("user"), Tower("item")
    adam = torch.optim.Adam([*user.weights.values(), *item.weights.values()], **DENSE)
    sections = (PACKAGE / "sections.txt").read_text(encoding="utf-8").split()
    items = [json.loads(line) for line in (PACKAGE / "items.jsonl").read_text(encoding="utf-8").splitlines()]
    of_section = {row["id"]: sections.index(row["attributes"]["section"]) for row in items}
    losses = []
    for step in range(AFTER[-1]):
        had, took = zip(*(event(n) for n in range(step * BATCH, (step + 1) * BATCH)))
        games = torch.full((BATCH,), sections.index("games"))
        size = torch.tensor([[0.5, 0.25, 0.125]] * BATCH, dtype=torch.float64)
        query = user({"installed": tables["packages"][list(had)], "section": tables["sections"][games], "size": size})
        distinct = sorted(set(took))
        kinds = [of_section[n] for n in distinct]
        vectors = item({"package": tables["packages"][distinct], "section": tables["sections"][kinds]})
        scores = query @ vectors.T / TEMPERATURE
        # A package that is installed is no negative.
        scores = scores.masked_fill(torch.tensor([[n == one for n in distinct] for one in had]), -1e30)
        loss = F.cross_entropy(scores, torch.tensor([distinct.index(n) for n in took]))
        leaves = [*tables.values(), *user.weights.values(), *item.weights.values()]
        gradients = torch.autograd.grad(loss, leaves)
        for leaf, gradient in zip(leaves, gradients):
            leaf.grad = gradient
        adam.step()
        with torch.no_grad():
            for name, rows in tables.items():
                assert rows.grad is not None
                touched = rows.grad.abs().sum(1) > 0
                state[name][touched] += rows.grad[touched].square().mean(1)
                rows[touched] -= RATE * rows.grad[touched] / (state[name][touched].sqrt() + EPSILON)[:, None]
        losses.append(loss.item())
    weights = {tower: {n: digits(w.float()) for n, w in of.weights.items()} for tower, of in (("user", user), ("item", item))}
    golden = {
        "losses": {str(steps): float(np.mean(losses[:steps])) for steps in AFTER},
        "packages": digits(tables["packages"].float()),
        "sections": digits(tables["sections"].float()),
        "weights": weights,
    }
    out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
