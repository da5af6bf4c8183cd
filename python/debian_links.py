"""Links of the Debian demo: the information of one package about others, as short lists and narrow tables that a reranker reads.

The teacher is a matrix S made from training users alone: EASE (Steck 2019, arXiv 1905.03375) over users weighted by one over the
root of their number of items, plus a tenth of the cosine of item-kNN, which also covers rare items. A user has declared packages,
packages built from it, a section and a maintainer: rows of S are packages, sections and maintainers, columns are packages. A
user's score of an item is the sum of S[h, item] over the history, the section and the maintainer.

S has a rank in the thousands, so a product of two narrow tables cannot approximate it: 256 wide, EASE falls from 0.72 to 0.62
recall@20. But few numbers of a row matter. Each row keeps the few largest, signed, as a list: the numbers of the items in two
digits of base 256, and their weights in one. The remainder is small and smooth, and two narrow tables approximate it well enough
(a singular value decomposition). A graph compares a candidate's number with all numbers of a user's lists, without
multiplications except in the sums.
"""
import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from sklearn.utils.extmath import randomized_svd

NEIGHBOURS, SIDE_NEIGHBOURS = 16, 64
REST = 64
ORIGIN = 24
LENGTH = 48
EASE_RIDGE, NEIGHBOURS_SHARE, WEIGHT_MAX = 5.0, 0.1, 1.2
LINKED_LEAST, EASE_LEAST = 2, 3


def matched(lists, number):
    """Finds candidates in the lists of each user, [Q, S, 3 * m], which hold packages and their weights.

    A package is an index in two digits of base 256, also in `number` [Q, K0, 2], the candidates. Returns three values per
    candidate, [Q, K0], over its entries in the lists: the sum of the weights, the sum of the square roots of the positive
    weights, and the largest weight."""
    high, low, code = lists.reshape(-1, lists.shape[1], 3, lists.shape[2] // 3).unbind(2)
    listed, code = (part.reshape(-1, 1, lists.shape[1] * (lists.shape[2] // 3)) for part in (high * 256 + low, code - 128))
    weight = code * code.abs() * (WEIGHT_MAX / 127**2) * listed.clamp(max=1)
    equal = (number[..., :1] * 256 + number[..., 1:] == listed).float()
    said = equal * weight
    return said.sum(-1), (equal * torch.sqrt(torch.relu(weight))).sum(-1), said.amax(-1)


def shared_origins(history, origin):
    """Returns how many packages of the history [Q, S, ORIGIN] come from the candidate's source [Q, K0, ORIGIN], and their
    total number [Q]."""
    alike = origin @ history.transpose(1, 2)
    return torch.relu(8 * alike - 7).sum(-1), (history * history).sum((1, 2))


def rows_or_zeros(table, rows):
    """Returns rows of a table, zeros for row -1."""
    return F.embedding(rows.clamp(min=0), table) * (rows >= 0).unsqueeze(-1)


def padded(histories):
    """Returns the first LENGTH ids of each history, [Q, LENGTH], padded with -1."""
    ids = torch.full((len(histories), LENGTH), -1)
    for row, history in zip(ids, histories):
        row[: min(len(history), LENGTH)] = torch.from_numpy(np.asarray(history)[:LENGTH])
    return ids


def origin_codes(sources, seed):
    """Returns a random unit-length code for each source, [n, ORIGIN], by item: of signs alone, so that two bits per number
    suffice."""
    number, names = pd.factorize(np.asarray(sources))
    signs = np.random.default_rng(seed).integers(0, 2, (len(names), ORIGIN)) * 2.0 - 1
    return torch.from_numpy((signs / ORIGIN**0.5).astype(np.float32))[torch.from_numpy(number)]


def encoded(rows, bits):
    """Encodes rows [n, width] with `bits` per number, in the format of the server: scale and bias in f16, then the codes, the
    first in the lowest bits."""
    least = rows.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((rows.max(1, keepdims=True) - least) / (2**bits - 1)).astype(np.float16)
    codes = np.rint((rows - least) / np.maximum(scale.astype(np.float32), 1e-8)).clip(0, 2**bits - 1).astype(np.uint8)
    groups = codes.reshape(len(rows), -1, 8 // bits)
    packed = (groups << np.arange(0, 8, bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    return np.concatenate([np.concatenate([scale, least.astype(np.float16)], 1).view(np.uint8), packed], 1)


def whole(rows):
    """Encodes integers from 0 to 255 [n, width] as int8 rows: scale 1, bias 0."""
    head = np.tile(np.array([1, 0], np.float16).view(np.uint8), (len(rows), 1))
    return np.concatenate([head, rows.astype(np.uint8)], 1)


def linked_items(edges, item_count):
    """Returns the items with links: those of at least LINKED_LEAST training users."""
    return np.flatnonzero(np.bincount(edges[1], minlength=item_count) >= LINKED_LEAST)


def teacher(matrix, sizes, items):
    """Returns the sparse similarity matrix S [n, items] of the columns of a matrix [users, n], whose first columns are the items; a user with m items (`sizes`) has the weight 1/√m."""
    weights = sp.diags((np.maximum(sizes, 1) ** -0.5).astype(np.float32))
    counts = np.asarray(matrix.sum(0)).ravel()
    cosine = (matrix @ sp.diags((np.maximum(counts, 1) ** -0.5).astype(np.float32))).tocsr()
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
    ease = sp.csr_matrix((ease.data, (common[ease.row], common[ease.col])), shape=neighbours.shape)
    return (neighbours + ease).tocsr()[:, :items].tocsr()


def listed(matrix, width):
    """Returns the `width` largest numbers of each row, by magnitude, as a list [rows, 3 * width], and the matrix as
    represented by the lists."""
    lists = np.zeros((matrix.shape[0], 3, width), np.float32)
    kept = matrix.copy()
    for row, (start, end) in enumerate(zip(matrix.indptr, matrix.indptr[1:])):
        weights = matrix.data[start:end]
        best = np.argsort(-np.abs(weights), kind="stable")[:width]
        number = matrix.indices[start:end][best] + 1
        code = np.rint(np.sign(weights[best]) * np.sqrt(np.minimum(np.abs(weights[best]) / WEIGHT_MAX, 1)) * 127)
        lists[row, :, : len(best)] = number // 256, number % 256, code + 128
        kept.data[start:end] = 0
        kept.data[start + best] = code * np.abs(code) * (WEIGHT_MAX / 127**2)
    return lists.reshape(len(lists), -1), kept


class Links:
    """Lists and narrow tables of packages, sections and maintainers, and the numbers of the items."""

    def __init__(self, data, edges, users, sides, seed):
        """Computes links from the edges of some users; `sides` has the row of each user's section and maintainer, -1 for none,
        and their numbers of rows."""
        item, source_of = edges[1], {source: user for user, source in enumerate(data.users.source)}
        self.items = linked_items(data.train_edges, data.item_count)
        self.row_of = np.full(data.item_count, -1)
        self.row_of[self.items] = np.arange(len(self.items))
        source = data.items.source.map(source_of).fillna(-1).to_numpy(np.int64)[self.items]
        built = np.flatnonzero(np.isin(source, users))
        pairs = [(edges[0], self.row_of[item]), (source[built], built)]
        start = np.cumsum([len(self.items)] + [count for _, count in sides])
        pairs += [(users, np.where(row[users] >= 0, row[users] + first, -1)) for (row, _), first in zip(sides, start)]
        user, column = (np.concatenate(part) for part in zip(*pairs))
        user, column = user[column >= 0], column[column >= 0]
        matrix = sp.csr_matrix((np.ones(len(user), np.float32), (user, column)), shape=(len(data.users), start[-1]))
        sizes = np.bincount(edges[0], minlength=len(data.users))
        wanted = teacher(matrix, sizes, len(self.items))

        self.lists, kept = [], []
        for first, end in zip((0, *start), start):
            lists, part = listed(wanted[first:end], SIDE_NEIGHBOURS if first else NEIGHBOURS)
            self.lists.append(torch.from_numpy(lists))
            kept.append(part)
        weights = (np.minimum(np.asarray(matrix.sum(0)).ravel(), 3000) ** 0.5 + 0.5).astype(np.float32)
        left = sp.diags(weights) @ (wanted - sp.vstack(kept))
        u, s, v = randomized_svd(left, REST, n_iter=3, random_state=seed)
        self.rest = [torch.from_numpy(np.ascontiguousarray(part)) for part in np.split(u * np.sqrt(s) / weights[:, None], start[:-1])]
        self.item_rest = torch.from_numpy(np.ascontiguousarray(v.T * np.sqrt(s)))
        number = np.arange(1, len(self.items) + 1)
        self.numbers = torch.from_numpy(np.stack([number // 256, number % 256], 1).astype(np.float32))

    def tables(self):
        """Returns the tables of the package by name, all int8: (stored rows, vocabulary)."""
        vocabularies = dict(installed="links", section="sections", maintainer="maintainers")
        stored = {f"{n}_lists": (whole(t.numpy()), v) for (n, v), t in zip(vocabularies.items(), self.lists)}
        stored |= {f"{n}_rest": (encoded(t.numpy(), 8), v) for (n, v), t in zip(vocabularies.items(), self.rest)}
        return stored | {"item_rest": (encoded(self.item_rest.numpy(), 8), "links"), "numbers": (whole(self.numbers.numpy()), "links")}

    def of_users(self, histories, sides):
        """Returns lists and remainders [Q, S, ...] of the packages in `histories` [Q, LENGTH], padded with -1, and of the
        `sides` [Q] each."""
        rows = [torch.where(histories >= 0, torch.from_numpy(self.row_of)[histories], -1)] + [side.unsqueeze(1) for side in sides]
        return [rows_or_zeros(table, row) for tables in (self.lists, self.rest) for table, row in zip(tables, rows)]

    def of_items(self, candidates):
        rows = torch.from_numpy(self.row_of)[candidates]
        return rows_or_zeros(self.numbers, rows), rows_or_zeros(self.item_rest, rows)
