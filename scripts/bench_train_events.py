#!/usr/bin/env python3
"""Measures events per second of two-tower training from Parquet, and of the same step in PyTorch on batches in memory.

    python scripts/bench_train_events.py --program target/release/sterling [--threads 1] [--rounds 3] [--cpu]

20 ids per user and one per item by Zipf 1.05 from tables of 1,000,000 rows of 64 numbers, networks 64-256-64 on both sides, unit length, softmax over the
items of a batch of 512, row-wise Adagrad on the tables (PyTorch: Adagrad on sparse gradients), Adam on the weights. Sterling's figure
includes reading and validating events. With `--cpu` the figures are per second of CPU time, for a machine that does other work: the
program's is the difference between a run on four times the events and a run on the events, without loading and writing the package. Rounds alternate between Sterling and PyTorch; the medians are printed. Needs PyTorch, PyArrow and the Python package.
"""

import argparse
import json
import pathlib
import resource
import shutil
import statistics
import subprocess
import tempfile
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from torch import nn

import sterling

ROWS, D, IDS, BATCH = 1_000_000, 64, 20, 512
TRAIN = """
[train]
label = "click"
batch = 512
uniform = 0
temperature = 0.1
optimizer = { kind = "rowwise_adagrad", rate = 0.02 }
"""


def network():
    return nn.Sequential(nn.Linear(D, 256), nn.ReLU(), nn.Linear(256, D))


class User(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, ids):
        return F.normalize(self.network(ids), dim=1)


class Item(nn.Module):
    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, row):
        return F.normalize(self.network(row), dim=1)


def draws(seed):
    """Samples ids by Zipf 1.05, with popular ids spread over the table."""
    rng = np.random.default_rng(seed)
    weights = np.cumsum(1 / np.arange(1, ROWS + 1) ** 1.05)
    weights /= weights[-1]
    places = rng.permutation(ROWS)
    return lambda count: places[np.minimum(np.searchsorted(weights, rng.random(count)), ROWS - 1)]


def write(folder, events):
    """Writes the package and its events."""
    tables = {"users": torch.randn(ROWS, D) * 0.1, "items": torch.randn(ROWS, D) * 0.1}
    features = {"user": [sterling.Ids("ids", "users", "mean")], "item": [sterling.Ids("row", "items", column="id")]}
    sterling.export(folder / "package", name="towers", user=User(), item=Item(), tables=tables, features=features, program=False)
    with (folder / "package/model.toml").open("a") as file:
        file.write(TRAIN)
    pq.write_table(pa.table({"id": np.arange(ROWS)}), folder / "items.parquet")
    draw = draws(1)
    ids = pa.ListArray.from_arrays(np.arange(0, events * IDS + 1, IDS, dtype=np.int32), draw(events * IDS))
    columns = {"item": draw(events), "user.ids": ids, "labels.click": np.ones(events, np.float32), "time": np.arange(events)}
    pq.write_table(pa.table(columns), folder / "events.parquet", row_group_size=50_000)


def ours(program, folder, threads, times=1):
    """Trains on the events, repeated `times` times. Returns the events per second that the program reports, the events, and the CPU seconds."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    shutil.rmtree(folder / "out.train", ignore_errors=True)
    flags = ["--events", folder / "events.parquet"] * times
    flags += ["--items", folder / "items.parquet", "--out", folder / "out", "--threads", threads]
    command = [program, "train", folder / "package", *flags, "--judge", 0, "--checkpoint-steps", 10**9]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, check=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    report = json.loads(done.stdout.splitlines()[-1])
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return report["events_per_second"], report["events"], cpu


def ours_by_cpu(program, folder, threads):
    """Returns the events per CPU second, without the fixed cost of a run."""
    (_, some, short), (_, more, long) = (ours(program, folder, threads, times) for times in (1, 4))
    return (more - some) / (long - short)


class Torch:
    """Returns the events per second of the same step in PyTorch, over batches in memory."""

    def __init__(self):
        draw = draws(1)
        self.users, self.items = nn.EmbeddingBag(ROWS, D, mode="mean", sparse=True), nn.EmbeddingBag(ROWS, D, mode="sum", sparse=True)
        self.user, self.item = User(), Item()
        self.sparse = torch.optim.Adagrad([*self.users.parameters(), *self.items.parameters()], lr=0.02)
        self.dense = torch.optim.Adam([*self.user.parameters(), *self.item.parameters()], lr=1e-3)
        self.offsets, self.one = torch.arange(0, BATCH * IDS, IDS), torch.arange(BATCH)
        self.data = [(torch.from_numpy(draw(BATCH * IDS)), torch.from_numpy(draw(BATCH))) for _ in range(20)]

    def step(self, n):
        ids, items = self.data[n % len(self.data)]
        query, item = self.user(self.users(ids, self.offsets)), self.item(self.items(items, self.one))
        loss = F.cross_entropy(query @ item.T / 0.1, self.one)
        self.sparse.zero_grad()
        self.dense.zero_grad()
        loss.backward()
        self.sparse.step()
        self.dense.step()

    def rate(self, seconds, clock):
        for n in range(5):
            self.step(n)
        start, n = clock(), 0
        while clock() - start < seconds:
            self.step(n)
            n += 1
        return BATCH * n / (clock() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default="sterling")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--events", type=int, default=300_000)
    parser.add_argument("--cpu", action="store_true", help="events per second of CPU time")
    parser.add_argument("--folder", type=pathlib.Path, help="folder of package and events; by default a temporary one")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = o.folder or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True, parents=True)
        if not (folder / "events.parquet").exists():
            write(folder, o.events)
        peer, rates = Torch(), ([], [])
        for _ in range(o.rounds):
            rates[0].append(ours_by_cpu(o.program, folder, o.threads) if o.cpu else ours(o.program, folder, o.threads)[0])
            rates[1].append(peer.rate(5, time.process_time if o.cpu else time.perf_counter))
        here, there = map(statistics.median, rates)
        print(json.dumps({"threads": o.threads, "sterling": round(here), "torch": round(there), "times": round(here / there, 2), "rounds": rates}))


if __name__ == "__main__":
    main()
