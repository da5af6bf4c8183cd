#!/usr/bin/env python3
"""Measures found recall against target recall: a two-tower model of MovieLens 100K, with users that the calibration did not see.

    pip install './python[export]'
    python models/movielens/recall.py OUT --program target/release/sterling

OUT receives the package. Half of the users calibrate the first publication (`samples` of the export), the other half ask. The exit code is 1 if the measured recall is more than 0.015 below the target. Data and terms are those of train.py.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import urllib.request

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from train import Film, fetch

import sterling

D, EPOCHS, BATCH, TOLERANCE = 32, 60, 128, 0.015
RECALLS, CANDIDATES = (0.90, 0.95, 0.98), (10, 100)
NAME = "movielens-two-tower"


class User(nn.Module):
    """Maps `history` [Q, D], the mean of the rows of the watched films, to `query` [Q, D]."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, history):
        return self.second(torch.relu(self.first(history)))


def train(histories, films, seed):
    """Each user's films are distinguished from all others by the mean of the rest of them."""
    torch.manual_seed(seed)
    rng, user, table = np.random.default_rng(seed), User(), nn.Parameter(torch.randn(films + 1, D) * 0.1)
    optimiser = torch.optim.Adam([table, *user.parameters()], lr=3e-3)
    for _ in range(EPOCHS):
        for pick in np.array_split(rng.permutation(len(histories)), len(histories) // BATCH):
            rows, wanted = zip(*(split(rng, histories[n]) for n in pick))
            ids = torch.tensor(np.concatenate(rows))
            offsets = torch.tensor(np.cumsum([0, *(len(row) for row in rows[:-1])]))
            logits = user(F.embedding_bag(ids, table, offsets, mode="mean")) @ table.T
            loss = F.cross_entropy(logits.repeat_interleave(wanted[0].size, 0), torch.tensor(np.concatenate(wanted)))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    print(f"loss {loss.item():.3f}")
    return user.eval(), table.detach()


def split(rng, history):
    """Eight of a user's films, and the others."""
    mixed = rng.permutation(history)
    return mixed[8:], mixed[:8]


def retrieve(url, **asked):
    """Returns the found films, and the search's report."""
    request = urllib.request.Request(f"{url}/v1/models/{NAME}:retrieve", json.dumps(asked).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return {item["id"] for item in answer["items"]}, answer.get("explain", {})


def found(url, histories, k, recall, leaves_out):
    """Mean share of the users' best `k` films that the search finds, and the estimated one."""
    shares, estimates = [], []
    for history in histories:
        asked = {"features": {"history": history}, "k": k, "candidates": k} | ({"exclude": history} if leaves_out else {})
        best, _ = retrieve(url, exact=True, **asked)
        some, explain = retrieve(url, recall=recall, explain=True, **asked)
        if len(some) != len(best):
            sys.exit(f"{len(some)} films found, expected {len(best)}")
        shares.append(len(best & some) / len(best))
        estimates.append(explain["probes"]["estimate"])
    return float(np.mean(shares)), float(np.mean(estimates))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--program", type=pathlib.Path, required=True, help="the sterling program that is measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    histories, rows = fetch()
    user, table = train(histories, max(row["id"] for row in rows), o.seed)
    order = np.random.default_rng(o.seed).permutation(len(histories))
    calibrating, asking = ([histories[n] for n in order[part::2]] for part in (0, 1))
    sterling.export(
        o.out, name=NAME, description="Films for those who liked these", user=user, item=Film(), tables={"films": table},
        features={"user": [sterling.Ids("history", "films", "mean")], "item": [sterling.Ids("film", "films", column="id")]},
        samples=[{"history": history} for history in calibrating], items=rows, program=False,
    )  # fmt: skip
    wrong = 0
    with tempfile.TemporaryDirectory() as store:
        sterling.publish(o.out, pathlib.Path(store), program=o.program)
        with sterling.serve(pathlib.Path(store), program=o.program) as server:
            print("| films | history | target | estimated | found |\n|---|---|---|---|---|")
            for leaves_out in (False, True):
                for k in CANDIDATES:
                    for recall in RECALLS:
                        share, estimate = found(server.url, asking, k, recall, leaves_out)
                        is_wrong = share < recall - TOLERANCE
                        wrong += is_wrong
                        print(f"| {k} | {'left out' if leaves_out else 'found too'} | {recall} | {estimate:.3f} | {share:.3f}{' **' if is_wrong else ''} |", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
