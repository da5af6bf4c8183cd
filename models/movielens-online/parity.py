#!/usr/bin/env python3
"""Runs the same steps in PyTorch and in `sterling train` from the same start, and prints the differences of tables, weights and loss.

    pip install './python[export]'
    python models/movielens-online/parity.py --program target/release/sterling

PyTorch computes in f64, takes gradients by autograd and updates rows by the formula of row-wise Adagrad; negatives are drawn by the same hash.
"""

import argparse
import gzip
import json
import math
import pathlib
import subprocess
import tempfile

import numpy as np
import onnx
import prepare
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

BATCH, UNIFORM, MASK64 = 64, 256, (1 << 64) - 1


def mix(number):
    """The finalizer of splitmix64, as `crates/train/src/step_random.rs` has it."""
    x = (number + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def drawn(seed, step, count):
    """Returns the item indices of the uniform negatives of a step."""
    start = mix(mix(seed) ^ step)
    return [(mix(start ^ n) * count) >> 64 for n in range(UNIFORM)]


class Peer:
    """The model in PyTorch, with its optimizers."""

    def __init__(self, package, ids):
        self.tables = {name: rows.double().requires_grad_() for name, rows in load_file(package / "tables.safetensors").items()}
        self.rates = {"seen": 0.1, "films": 0.1, "bias": 0.02}
        self.state = {name: torch.zeros(len(rows), dtype=torch.float64) for name, rows in self.tables.items()}
        graph = onnx.load(package / "user.onnx").graph
        numbers = {tensor.name: torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy()).double() for tensor in graph.initializer}
        self.weights = {name: numbers[name].requires_grad_() for name in numbers if name.startswith("module.")}
        self.adam = torch.optim.Adam(self.weights.values(), lr=1e-3)
        self.ids, self.gaps, self.last = torch.tensor(ids), np.full(len(ids), 1000.0 * BATCH, np.float32), np.zeros(len(ids), np.int64)
        self.places = {film: place for place, film in enumerate(ids)}
        self.events, self.steps = 0, 0

    def log_q(self, distinct, count):
        self.events += count
        for place in distinct:
            gap = self.events - self.last[place] if self.last[place] else min(1000 * BATCH, self.events)
            self.gaps[place] = np.float32(0.95) * self.gaps[place] + np.float32(0.05) * np.float32(gap)
            self.last[place] = self.events
        return [math.log(min(1, count / self.gaps[place])) for place in distinct]

    def query(self, events):
        rows = [self.tables["seen"][event["user"]["history"]] for event in events]
        mean = torch.stack([row.mean(0) if len(row) else torch.zeros(prepare.D, dtype=torch.float64) for row in rows])
        linear = lambda x, name: F.linear(x, self.weights[f"module.{name}.weight"], self.weights[f"module.{name}.bias"])
        return torch.cat([mean + linear(torch.relu(linear(mean, "first")), "second"), torch.ones(len(events), 1, dtype=torch.float64)], 1)

    def step(self, events, seed):
        self.steps += 1
        distinct = sorted({self.places[event["item"]] for event in events})
        negatives = drawn(seed, self.steps, len(self.ids))
        log_q = torch.tensor(self.log_q(distinct, len(events)) + [math.log(UNIFORM / len(self.ids))] * UNIFORM, dtype=torch.float64)
        films = self.ids[distinct + negatives]
        items = torch.cat([self.tables["films"][films], self.tables["bias"][films]], 1)
        scores = self.query(events) @ items.T - log_q
        target = torch.tensor([distinct.index(self.places[event["item"]]) for event in events])
        masked = torch.stack([torch.isin(films, torch.tensor([*event["context"]["exclude"], event["item"]])) for event in events])
        masked[torch.arange(len(events)), target] = False
        loss = F.cross_entropy(scores.masked_fill(masked, -1e30), target)
        self.adam.zero_grad()
        gradients = torch.autograd.grad(loss, [*self.tables.values(), *self.weights.values()])
        for weight, gradient in zip(self.weights.values(), gradients[len(self.tables) :]):
            weight.grad = gradient
        self.adam.step()
        with torch.no_grad():
            for (name, rows), gradient in zip(self.tables.items(), gradients):
                touched = gradient.abs().sum(1) > 0
                self.state[name][touched] += gradient[touched].square().mean(1)
                rows[touched] -= self.rates[name] * gradient[touched] / (self.state[name][touched].sqrt() + 1e-8)[:, None]
        return loss.item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default="sterling")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wheel", type=pathlib.Path, help="the wheel of RecBole, where it is on this machine already")
    o = parser.parse_args()
    torch.set_num_threads(1)
    ratings, rows = prepare.fetch(wheel=o.wheel)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        told = prepare.with_histories(ratings)[: o.steps * BATCH]
        package = folder / "package"
        prepare.write_package(package, rows, prepare.samples(told), o.seed)
        prepare.train_section(package, batch=BATCH)
        prepare.write_events(folder / "events.jsonl.gz", told)
        flags = ["--events", folder / "events.jsonl.gz", "--out", folder / "out", "--judge", "0", "--seed", o.seed]
        done = subprocess.run([str(part) for part in (o.program, "train", package, *flags)], stdout=subprocess.PIPE, check=True, text=True)
        report = json.loads(done.stdout.splitlines()[-1])
        peer = Peer(package, [row["id"] for row in rows])
        with gzip.open(folder / "events.jsonl.gz", "rt") as file:
            events = [json.loads(line) for line in file]
        losses = [peer.step(events[n : n + BATCH], o.seed) for n in range(0, len(events), BATCH)]
        ours = load_file(folder / "out/tables.safetensors")
        after = {t.name: torch.from_numpy(onnx.numpy_helper.to_array(t).copy()) for t in onnx.load(folder / "out/user.onnx").graph.initializer}
        print(f"{o.steps} steps: mean loss {np.mean(losses):.7f} in PyTorch, {report['loss']:.7f} here, difference {abs(np.mean(losses) - report['loss']):.1e}")
        for name, theirs in [*peer.tables.items(), *peer.weights.items()]:
            here, theirs = (ours | after)[name], theirs.detach()
            print(f"{name}: {float((here - theirs).norm() / theirs.norm()):.1e} of its norm, largest difference {float((here - theirs).abs().max()):.1e}")


if __name__ == "__main__":
    main()
