#!/usr/bin/env python3
"""MovieLens 100K from a package of PyPI, a SASRec-like user tower, and its leave-one-out figures as a server answers.

    pip install './python[export,client]'
    python models/movielens/train.py OUT [--program target/release/sterling]

OUT receives the model package. The ratings come with the wheel of RecBole (`pip download`, nothing of it is run); they may be used for
research, not redistributed, so neither they nor models that are trained on them are part of this repository (README.md).

Every user's last film in time is the test's, the one before the validation's; the rest is trained on. All films are ranked. Every third user's
training part is a sample request of the package (queries.jsonl); recall is measured with the other users. SASRec: Kang
and McAuley 2018, arXiv 1808.09781, here with the softmax over all films that Klenitskiy and Vasilev 2023 (arXiv 2309.07602) recommend.
"""
import argparse
import copy
import math
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import sterling

WHEEL, FOLDER = "recbole==1.2.1", "recbole/dataset_example/ml-100k"
D, LENGTH, HEADS, BLOCKS, DROPOUT = 64, 50, 2, 2, 0.3
# One user in this number is a sample of the requests to come.
SAMPLED = 3


def fetch():
    """Histories, film ids in the order of time by user, and the films as rows."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL], check=True)
        with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as wheel:
            ratings, films = (wheel.read(f"{FOLDER}/ml-100k.{part}").decode().splitlines()[1:] for part in ("inter", "item"))
    seen = {}
    for line in ratings:
        user, film, _, when = line.split("\t")
        seen.setdefault(int(user), []).append((float(when), int(film)))
    # Of films rated in the same second the lower id counts as the earlier one.
    histories = [[film for _, film in sorted(seen[user])] for user in sorted(seen)]
    rows = []
    for line in films:
        film, title, year, classes = line.split("\t")
        rows.append({"id": int(film), "title": title, "year": int(year) if year.isdigit() else 0, "genres": classes.split()})
    return histories, rows


class Block(nn.Module):
    """Causal self-attention and a network, each behind a layer norm and with a residual connection."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.first, self.second, self.dropout = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), nn.Dropout(DROPOUT)

    def forward(self, x, hidden):
        def heads(part):
            return part.reshape(-1, LENGTH, HEADS, D // HEADS).transpose(1, 2)

        normal = self.before(x)
        query, key, value = heads(self.query(normal)), heads(self.key(normal)), heads(self.value(normal))
        weights = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(D // HEADS) + hidden, -1)
        x = x + self.dropout(self.out((weights @ value).transpose(1, 2).reshape(-1, LENGTH, D)))
        return x + self.dropout(self.second(torch.relu(self.first(self.between(x)))))


class Sasrec(nn.Module):
    """Maps `history` [Q, S, D] with its mask to `query` [Q, D]: the final state at the last film's position."""

    def __init__(self):
        super().__init__()
        self.places, self.blocks = nn.Parameter(torch.randn(LENGTH, D) * 0.02), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.dropout = nn.LayerNorm(D), nn.Dropout(DROPOUT)
        # Finite, so that a history without films has a softmax too.
        self.register_buffer("later", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def encoded(self, history, history_mask):
        """Returns [Q, S, D]: for each position, the prediction of the next film."""
        hidden = self.later + ((history_mask - 1) * 1e4).unsqueeze(1).unsqueeze(1)
        x = self.dropout(history * math.sqrt(D) + self.places)
        for block in self.blocks:
            x = block(x, hidden)
        return self.norm(x)

    def forward(self, history, history_mask):
        # 1 at the last position that has a film: there the mask falls to 0.
        last = history_mask - torch.cat([history_mask[:, 1:], history_mask[:, :1] * 0], 1)
        return (self.encoded(history, history_mask) * last.unsqueeze(-1)).sum(1)


class Film(nn.Module):
    """A film's vector is its row in the table."""

    def forward(self, film):
        return film.clone()


def padded(histories):
    """Film ids [Q, LENGTH], the last ones first filled in, then zeros; and the mask."""
    ids = np.zeros((len(histories), LENGTH), np.int64)
    for row, history in zip(ids, histories):
        row[: min(len(history), LENGTH)] = history[-LENGTH:]
    return torch.from_numpy(ids), torch.from_numpy((ids > 0).astype(np.float32))


def figures(ranks):
    """Returns HR@10 and NDCG@10 from the ranks (from 0) of the held-out films."""
    ranks = np.asarray(ranks)
    return float((ranks < 10).mean()), float(np.where(ranks < 10, 1 / np.log2(ranks + 2.0), 0).mean())


@torch.no_grad()
def ranks_of(user, table, histories, wanted):
    """Returns the rank of each held-out film among all films."""
    ids, mask = padded(histories)
    scores = user.eval()(F.embedding(ids, table), mask) @ table.T
    scores[:, 0] = -torch.inf
    return (scores > scores.gather(1, torch.tensor(wanted)[:, None])).sum(1).numpy()


def train(histories, films, epochs, patience, seed, batch=128):
    """Trains with a softmax over all films at every position; keeps the epoch with the best NDCG@10 on validation films."""
    torch.manual_seed(seed)
    rng, user, table = np.random.default_rng(seed), Sasrec(), nn.Parameter(torch.randn(films + 1, D) * 0.02)
    optimiser = torch.optim.Adam([table, *user.parameters()], lr=1e-3, betas=(0.9, 0.98), weight_decay=1e-6)
    known, best = [history[:-2] for history in histories], (-1.0, 0, None, None)
    for epoch in range(1, epochs + 1):
        losses, start = [], time.time()
        for pick in np.array_split(rng.permutation(len(known)), math.ceil(len(known) / batch)):
            ends = [rng.integers(min(len(known[n]), LENGTH + 1), len(known[n]) + 1) for n in pick]
            windows = [known[n][max(0, end - LENGTH - 1) : end] for n, end in zip(pick, ends)]
            ids, mask = padded([window[:-1] for window in windows])
            following, _ = padded([window[1:] for window in windows])
            encoded = user.train().encoded(F.embedding(ids, table), mask)
            loss = F.cross_entropy((encoded[mask > 0]) @ table.T, following[mask > 0])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        hit, ndcg = figures(ranks_of(user, table, known, [history[-2] for history in histories]))
        if ndcg > best[0]:
            best = (ndcg, epoch, copy.deepcopy(user), table.detach().clone())
        if epoch % 5 == 0:
            print(f"epoch {epoch}: loss {np.mean(losses):.3f}, validation HR@10 {hit:.4f} NDCG@10 {ndcg:.4f}, {time.time() - start:.1f} s", flush=True)
        if epoch - best[1] >= patience:
            break
    print(f"epoch {best[1]} stays, validation NDCG@10 {best[0]:.4f}")
    return best[2].eval(), best[3]


def served(package, program, histories):
    """Figures of the test's films as a server ranks them by exact search: among all films, and among those not yet seen."""
    with tempfile.TemporaryDirectory() as store:
        sterling.publish(package, pathlib.Path(store), program=program)
        with sterling.serve(pathlib.Path(store), program=program) as server, sterling.Client(server.url) as client:
            for name, unseen in (("all films", False), ("films not yet seen", True)):
                ranks = []
                for history in histories:
                    left_out = {"exclude": history[:-1]} if unseen else {}
                    answer = client.retrieve("movielens", features={"history": history[:-1][-LENGTH:]}, k=10, exact=True, **left_out)
                    found = answer.ids.tolist()
                    ranks.append(found.index(history[-1]) if history[-1] in found else 10)
                print("served, test, among {}: HR@10 {:.4f} NDCG@10 {:.4f}".format(name, *figures(ranks)), flush=True)


def recalls(package, program, histories):
    """The share of an exact search's films that a search by lists finds, for a target recall."""
    with tempfile.TemporaryDirectory() as store:
        sterling.publish(package, pathlib.Path(store), program=program)
        with sterling.serve(pathlib.Path(store), program=program) as server, sterling.Client(server.url) as client:
            for name, unseen in (("all films", False), ("films not yet seen", True)):
                for asked in (0.9, 0.98):
                    found = []
                    for history in histories:
                        fields = {"features": {"history": history[-LENGTH:]}, "k": 10, "candidates": 10, "exclude": history if unseen else []}
                        true = set(client.retrieve("movielens", exact=True, **fields).ids.tolist())
                        best = client.retrieve("movielens", recall=asked, **fields).ids.tolist()
                        found.append(len(true.intersection(best)) / len(true))
                    print(f"served, {len(found)} users that are no samples, among {name}: recall@10 {np.mean(found):.4f} for the target {asked}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--program", type=pathlib.Path, help="the sterling program that serves the figures; without it they are PyTorch's")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--patience", type=int, default=30, help="epochs without a better validation after which training ends")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    histories, rows = fetch()
    films = max(row["id"] for row in rows)
    print(f"{len(histories)} users, {len(rows)} films, {sum(map(len, histories))} ratings")
    user, table = train(histories, films, o.epochs, o.patience, o.seed)
    counts = np.bincount([film for history in histories for film in history[:-2]], minlength=films + 1)
    popular = [int((counts > counts[history[-1]]).sum()) for history in histories]
    print("test, popularity: HR@10 {:.4f} NDCG@10 {:.4f}".format(*figures(popular)))
    known, wanted = [history[:-1] for history in histories], [history[-1] for history in histories]
    print("test, PyTorch, among all films: HR@10 {:.4f} NDCG@10 {:.4f}".format(*figures(ranks_of(user, table, known, wanted))))
    exported = sterling.export(
        o.out, name="movielens", description="Which film comes next after these?", user=user, item=Film(), tables={"films": table},
        features={"user": [sterling.Ids("history", "films", "none", length=LENGTH)], "item": [sterling.Ids("film", "films", column="id")]},
        samples=[{"history": history[:-2][-LENGTH:]} for history in histories[::SAMPLED]], items=rows, program=o.program or False,
    )  # fmt: skip
    print(exported)
    if o.program:
        served(o.out, o.program, histories)
        recalls(o.out, o.program, [history[:-1] for n, history in enumerate(histories) if n % SAMPLED])


if __name__ == "__main__":
    main()
