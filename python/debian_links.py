"""Links of the Debian demo: what having one package says about another, as two tables that a reranker reads.

The teacher is a matrix S [items, items] made from training users alone: EASE (Steck 2019, arXiv 1905.03375) over users weighted by one
over the root of their number of items, and a fifth of the cosine of item-kNN, which also knows rare items. A user's score of an item
is the sum of S[h, item] over the history. Its rank is in the thousands, so a product of two narrow tables cannot hold it: 256 wide, it
falls from 0.72 to 0.62 recall@20. A rectifier between product and sum makes narrow tables do, since unrelated pairs then add nothing:

    score(history, item) = sum over h of relu(a[h] . b[item])  +  (sum over h of a'[h]) . b'[item]

The tables are learned to give the teacher's scores for what training users have. They hold LINK numbers a row: KERNEL of `a`, of which
the last is a constant 1 that carries each item's threshold and says that there is an item, and LINEAR of `a'`.
"""
import time

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from torch import nn

KERNEL, LINEAR = 65, 15
LINK = KERNEL + LINEAR
ORIGIN = 24
LENGTH = 48
EASE_RIDGE, NEIGHBOURS_SHARE = 10.0, 0.2
LINKED_LEAST, EASE_LEAST = 2, 3


def linked_scores(history, link):
    """The score and the strongest link of candidates [Q, K0, LINK], for histories [Q, S, LINK] whose missing rows are zeros."""
    kernel = torch.relu(link[..., :KERNEL] @ history[..., :KERNEL].transpose(1, 2))
    linear = link[..., KERNEL:] @ history[..., KERNEL:].sum(1).unsqueeze(-1)
    return kernel.sum(-1) + linear.squeeze(-1), kernel.amax(-1)


def shared_origins(history, origin):
    """How many packages of the history [Q, S, ORIGIN] come from the candidate's source [Q, K0, ORIGIN], and how many there are [Q]."""
    alike = origin @ history.transpose(1, 2)
    return torch.relu(8 * alike - 7).sum(-1), (history * history).sum((1, 2))


def rows_or_zeros(table, rows):
    """Rows of a table, zeros for row -1."""
    return F.embedding(rows.clamp(min=0), table) * (rows >= 0).unsqueeze(-1)


def padded(histories):
    """The first LENGTH ids of each history, [Q, LENGTH], -1 where there is none."""
    ids = torch.full((len(histories), LENGTH), -1)
    for row, history in zip(ids, histories):
        row[: min(len(history), LENGTH)] = torch.from_numpy(np.asarray(history)[:LENGTH])
    return ids


def origin_codes(sources, seed):
    """A random code of length 1 for each source, [n, ORIGIN], by item: of signs alone, so that two bits a number hold it."""
    number, names = pd.factorize(np.asarray(sources))
    signs = np.random.default_rng(seed).integers(0, 2, (len(names), ORIGIN)) * 2.0 - 1
    return torch.from_numpy((signs / ORIGIN**0.5).astype(np.float32))[torch.from_numpy(number)]


def encoded(rows, bits):
    """Rows [n, width] with `bits` a number, as the server reads them: scale and bias in f16, then the codes, the first in the lowest bits."""
    least = rows.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((rows.max(1, keepdims=True) - least) / (2**bits - 1)).astype(np.float16)
    codes = np.rint((rows - least) / np.maximum(scale.astype(np.float32), 1e-8)).clip(0, 2**bits - 1).astype(np.uint8)
    groups = codes.reshape(len(rows), -1, 8 // bits)
    packed = (groups << np.arange(0, 8, bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return np.concatenate([np.concatenate([scale, least.astype(np.float16)], 1).view(np.uint8), packed], 1)


def linked_items(edges, item_count):
    """Items that have rows in the tables: those of at least LINKED_LEAST training users."""
    return np.flatnonzero(np.bincount(edges[1], minlength=item_count) >= LINKED_LEAST)


def teacher(edges, users, items):
    """S [n, n] over the given items, sparse, from the edges of some users."""
    user, item, _ = edges
    columns = np.full(max(item.max(), items.max()) + 1, -1)
    columns[items] = np.arange(len(items))
    kept = columns[item] >= 0
    matrix = sp.csr_matrix((np.ones(kept.sum(), np.float32), (user[kept], columns[item[kept]])), shape=(users, len(items)))
    weights = sp.diags((np.maximum(np.asarray(matrix.sum(1)).ravel(), 1) ** -0.5).astype(np.float32))
    counts = np.asarray(matrix.sum(0)).ravel()
    cosine = matrix @ sp.diags((np.maximum(counts, 1) ** -0.5).astype(np.float32))
    neighbours = (cosine.T @ (weights @ cosine)).tocsr() * NEIGHBOURS_SHARE
    neighbours.setdiag(0)

    common = np.flatnonzero(counts >= EASE_LEAST)
    part = matrix[:, common]
    gram = np.asarray((part.T @ (weights @ part)).todense(), np.float32)
    gram[np.diag_indices_from(gram)] += EASE_RIDGE
    inverse = torch.linalg.inv(torch.from_numpy(gram)).numpy()
    inverse /= -np.diag(inverse)[None].copy()
    inverse[np.abs(inverse) < 0.003] = 0
    inverse[np.diag_indices_from(inverse)] = 0
    ease = sp.coo_matrix(inverse)
    return (neighbours + sp.csr_matrix((ease.data, (common[ease.row], common[ease.col])), shape=neighbours.shape)).tocsr()


class Lessons:
    """Users' histories with some items each and the teacher's scores of these: the best, frequent and arbitrary ones."""

    def __init__(self, links, teacher, frequency, histories, rng, best=64, frequent=48, any_other=16):
        count = teacher.shape[0]
        chance = np.sqrt(frequency) / np.sqrt(frequency).sum()
        self.histories = np.full((len(histories), LENGTH), -1, np.int64)
        for row, history in zip(self.histories, histories):
            known = rng.permutation(links[history[rng.random(len(history)) < 0.8]])[:LENGTH]
            known = known[known >= 0]
            row[: len(known)] = known
        self.histories = self.histories[self.histories[:, 0] >= 0]
        self.lengths = (self.histories >= 0).sum(1)
        items, scores = [], []
        for some in np.array_split(self.histories, len(self.histories) // 256 + 1):
            owner, place = np.nonzero(some >= 0)
            having = sp.csr_matrix((np.ones(len(owner), np.float32), (owner, some[owner, place])), shape=(len(some), count))
            wanted = np.asarray((having @ teacher).todense())
            top = np.argpartition(-wanted, best, 1)[:, :best]
            others = [rng.choice(count, (len(some), frequent), p=chance), rng.integers(0, count, (len(some), any_other))]
            items.append(np.concatenate([top, *others], 1))
            scores.append(np.take_along_axis(wanted, items[-1], 1))
        self.items, self.scores = np.concatenate(items), np.concatenate(scores)


class Links:
    """The two tables, [n, LINK], over the items that have links."""

    def __init__(self, items, vectors, seed):
        """Starts from the towers' item vectors [N, D], D = KERNEL - 1: similar packages are linked."""
        generator = torch.Generator().manual_seed(seed)
        self.items = items
        self.row_of = np.full(len(vectors), -1)
        self.row_of[items] = np.arange(len(items))
        vectors, one = vectors[torch.from_numpy(items)], torch.ones(len(items), 1)
        linear = torch.randn(len(items), LINEAR, generator=generator) * 0.1
        self.history = nn.Parameter(torch.cat([vectors, one, linear], 1))
        self.item = nn.Parameter(torch.cat([0.7 * vectors, -0.35 * one, torch.zeros(len(items), LINEAR)], 1))

    def learn(self, lessons, epochs, rate, seed, batch=512):
        """Least squares, relative to the score; lists of alike length share a batch."""
        generator = torch.Generator().manual_seed(seed)
        optimiser = torch.optim.Adam([{"params": [self.history]}, {"params": [self.item]}], fused=True)
        steps = epochs * (len(lessons.items) // batch + 1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [rate, rate / 2], total_steps=steps + 1, pct_start=0.1)
        histories, items, scores = (torch.from_numpy(part) for part in (lessons.histories, lessons.items, lessons.scores))
        lengths = torch.from_numpy(lessons.lengths)
        for epoch in range(epochs):
            batches = torch.argsort(lengths + 3 * torch.rand(len(lengths), generator=generator)).split(batch)
            losses, start = [], time.time()
            for n in torch.randperm(len(batches), generator=generator).tolist():
                pick = batches[n]
                history = rows_or_zeros(self.history, histories[pick, : int(lengths[pick].max())])
                found = linked_scores(history, F.embedding(items[pick], self.item))[0]
                wanted = scores[pick]
                loss = ((found - wanted) ** 2 / (0.1 + wanted.abs())).mean()
                optimiser.zero_grad()
                loss.backward()
                self.history.grad[:, KERNEL - 1] = 0
                optimiser.step()
                schedule.step()
                losses.append(loss.item())
            print(f"links: epoch {epoch + 1} of {epochs}, loss {np.mean(losses):.5f}, {time.time() - start:.0f} s", flush=True)
