#!/usr/bin/env python3
"""Writes graphs of usual sizes for `benches/dense.rs` and `train_dense` of `crates/graph` with PyTorch's exporter, with random
weights.

    pip install './python[export]'
    python python/make_bench_graphs.py benches/graphs

`mol` is the mixture of logits of the zoo with 8 x 8 vectors of 32 numbers; `target` attends with 4 heads, and `din` with a small
network, over a history of 200 items of 64 numbers. `tower` is a multilayer perceptron 64-256-64 whose result has length 1.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import onnx
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import make_dense_golden as golden
from zoo import mol

golden.D, golden.S, golden.H = 64, 200, 4
mol.D, mol.USER_PARTS, mol.ITEM_PARTS, mol.WIDTH = 64, 8, 8, 32


class Tower(torch.nn.Module):
    """A multilayer perceptron whose result has length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(self.layers(features), dim=-1)


def main(out: pathlib.Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    random = np.random.default_rng(7)
    rows = lambda *shape: random.normal(scale=0.1, size=(3, *shape)).astype(np.float32)  # noqa: E731
    query, item = (False, rows(64)), (True, rows(5, 64))
    history, mask = (False, rows(200, 64)), (False, np.ones((3, 200), np.float32))
    models: dict[str, tuple[torch.nn.Module, dict[str, tuple[bool, np.ndarray]]]] = {
        "mol": (mol.Mixture(), {"query": query, "user_parts": (False, rows(8, 32)), "item": item, "parts": (True, rows(5, 256))}),
        "target": (golden.Target(), {"item": item, "history": history, "mask": mask}),
        "din": (golden.Din(), {"query": query, "item": item, "history": history, "mask": mask}),
        "tower": (Tower(), {"features": (True, rows(64))}),
    }
    for name, (model, inputs) in models.items():
        onnx.save(golden.exported(name, model, inputs), out / f"{name}.onnx")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
