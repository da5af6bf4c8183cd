"""Compares the dense part of a training step of a two-tower model with PyTorch, interleaved on one thread: prints the table of
docs/internals/learning.md.

    cargo bench -p sterling-graph --bench train_dense --no-run
    pip install torch numpy
    python python/bench_train_dense.py [BENCH]

BENCH is the built bench, by default the newest target/release/deps/train_dense-*. Both do the same work: towers 64-256-64 of users and
items over 512 rows each, in-batch softmax at temperature 0.1, gradients of both towers and of their inputs, Adam. Rounds alternate
between the two, ROUNDS times; the table has medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
ROWS, WIDTH, HIDDEN = 512, 64, 256
ROUNDS = 15
ROUND_SECONDS = 0.1
PARTS = ["forward", "backward", "softmax", "adam"]


class Peer:
    """Training step in PyTorch."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        tower = lambda: nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))  # noqa: E731
        self.user, self.item = tower(), tower()
        self.optimizer = torch.optim.Adam([*self.user.parameters(), *self.item.parameters()], lr=1e-3)
        self.inputs = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2)]
        self.labels = torch.arange(ROWS)

    def step(self) -> None:
        query, item = F.normalize(self.user(self.inputs[0]), dim=1), F.normalize(self.item(self.inputs[1]), dim=1)
        loss = F.cross_entropy(query @ item.T / 0.1, self.labels)
        self.optimizer.zero_grad()
        for x in self.inputs:
            x.grad = None
        loss.backward()
        self.optimizer.step()

    def microseconds(self) -> float:
        """Returns the mean time per step in a round."""
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_SECONDS:
            self.step()
            calls += 1
        return (time.perf_counter() - start) / calls * 1e6


class Bench:
    """Sterling's bench as a subprocess; each input line names the case to time."""

    def __init__(self, path: Path, kernel: str | None = None) -> None:
        env = os.environ | ({"STERLING_KERNEL": kernel} if kernel else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(path), "--turns"], stdin=pipe, stdout=pipe, text=True, env=env)
        self.kernel, flops = self.line().split()
        self.flops = float(flops)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def microseconds(self, case: str) -> float:
        """Returns the mean time per call in a round."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self.line())


def built() -> Path:
    """Returns the newest build of the bench."""
    found = [p for p in (ROOT / "target/release/deps").glob("train_dense-*") if os.access(p, os.X_OK) and not p.suffix]
    if not found:
        sys.exit("no bench is built: cargo bench -p sterling-graph --bench train_dense --no-run")
    return max(found, key=lambda p: p.stat().st_mtime)


def main() -> None:
    torch.set_num_threads(1)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else built()
    bench, peer = Bench(path), Peer()
    rounds = []
    for _ in range(ROUNDS):
        own = {case: bench.microseconds(case) for case in ["step", *PARTS, "outer", "product"]}
        rounds.append(own | {"torch": peer.microseconds()})
    of = {case: statistics.median(one[case] for one in rounds) for case in rounds[0]}
    print(f"torch {torch.__version__}, one thread; kernels {bench.kernel}; {ROUNDS} rounds interleaved, medians\n")
    print("| case | µs |\n|---|---|")
    print(f"| PyTorch, a step | {of['torch']:.0f} |\n| Sterling, a step | {of['step']:.0f} |")
    for case in PARTS:
        towers = "" if case == "softmax" else ", one tower"
        print(f"| of it {case}{towers} | {of[case]:.0f} |")
    outer, product = (bench.flops / of[case] / 1e3 for case in ["outer", "product"])
    print(f"\nPyTorch / Sterling: {of['torch'] / of['step']:.2f}")
    print(f"outer products {outer:.1f} GFLOP/s, products {product:.1f} GFLOP/s: {outer / product:.2f}")


if __name__ == "__main__":
    main()
