#!/usr/bin/env python3
"""Trains the demo's model on the Debian data and writes the model package.

    python train_debian.py DATA OUT [--seed 1] [--threads 2]

DATA holds items.parquet, users.parquet and edges.parquet (see extract_debian.py). OUT receives model.toml, user.onnx, item.onnx,
overarch.onnx, tables.safetensors, the vocabularies, items.parquet, heldout.jsonl, golden.json, warmup.jsonl and metrics.json.

A user is a source package, its history the binary packages it declares; the task is to predict the others that belong with them.
1. Users are split into training, validation and test users (debian_data.py). Everything is chosen on validation users.
2. Two towers are trained with a sampled softmax (in-batch and uniform negatives, corrected for popularity), on four fifths of the training
   users. Sparse lookups happen outside the graphs: an input is the pooled embedding of the feature of its name.
3. Links store the scores of EASE and item-kNN for each pair of packages, from the same four fifths (debian_links.py).
4. The OverArch, a network over links, common sources, similarity and popularity, with a head per label and one for any label,
   learns to rank the candidates of the towers for the remaining fifth. Towers remember the users they are trained on (recall@20 of 0.87 instead of
   0.67), so a reranker trained on those would overestimate the similarity; the same holds for links.
5. Towers are tuned for a few epochs on all training users, and links are made of all of them; the scales of both stay the same. Then the heads
   are calibrated and the value model's weights chosen on validation users.
6. Everything is exported, read back as stored, and evaluated (evaluate_debian.py).
"""
import argparse
import json
import math
import pathlib
import time

import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from torch import nn

import debian_data
import evaluate_debian
from debian_data import Labels, TASKS, recall
from debian_links import LENGTH, NEIGHBOURS, ORIGIN, REST, SIDE_NEIGHBOURS, Links, encoded, matched, origin_codes
from debian_links import padded, rows_or_zeros, shared_origins

HEADS = [*TASKS, "related"]
D, TEXT, CATEGORY, TAG = 64, 32, 16, 32
HISTORY_MAX = 48
RESERVED_SHARE = 0.2
COLUMNS = ["log_popularity"] + [f"log_{task}" for task in TASKS]


class Bags:
    """Concatenated lists of ids; a block of lists is selected without a loop."""

    def __init__(self, lists):
        self.lengths = np.array([len(some) for some in lists], np.int64)
        self.ids = np.concatenate([np.asarray(some, np.int64) for some in lists])
        self.starts = np.cumsum(self.lengths) - self.lengths

    def take(self, which):
        """Returns ids of the chosen lists and the length of each."""
        lengths = self.lengths[which]
        ends = np.cumsum(lengths)
        at = np.repeat(self.starts[which] - (ends - lengths), lengths) + np.arange(lengths.sum())
        return self.ids[at], lengths


def pooled(table, ids, lengths):
    """Returns the sum of the embeddings of each list, [Q, width]."""
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    return F.embedding_bag(torch.from_numpy(ids), table, starts, mode="sum")


class Vocabulary:
    """Values that occur at least `least` times, sorted; a value's row is its line."""

    def __init__(self, values, least=1):
        counts = pd.Series([v for v in values if v]).value_counts()
        self.values = sorted(counts.index[counts >= least])
        self.row = {v: n for n, v in enumerate(self.values)}

    def bags(self, lists):
        return Bags([[self.row[v] for v in values if v in self.row] for values in lists])


def unit(x):
    """Normalizes rows to length 1; a row of zeros stays zero."""
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-12)


class Tower(nn.Module):
    """Inputs at unit length, one hidden layer, a residual from the history or the id."""

    def __init__(self, widths, hidden=256):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(len(widths)))
        self.first, self.second = nn.Linear(sum(widths), hidden), nn.Linear(hidden, D)

    def forward(self, *inputs):
        parts = [unit(x) * self.scale[n] for n, x in enumerate(inputs)]
        return unit(self.second(torch.relu(self.first(torch.cat(parts, 1)))) + parts[0])


class OverArch(nn.Module):
    """Scores [Q, K0] candidates for every head, from their similarity and popularity, from the links of each package of the
    history, the section and the maintainer of the user, and from the number of packages of the history with the candidate's
    source.

    Similarity and links are added to the output of the network: an untrained OverArch sums the two orders. Its inputs NUMBERS
    have no weights.
    """

    NUMBERS, DIRECT = 15 + len(COLUMNS), (0, 10, 9)

    def __init__(self, hidden=64):
        super().__init__()
        self.first, self.second, self.heads = nn.Linear(self.NUMBERS, hidden), nn.Linear(hidden, 48), nn.Linear(48, len(HEADS))
        self.direct = nn.Parameter(torch.tensor([[1.0], [1.5], [0.75]]).repeat(1, len(HEADS)))
        nn.init.constant_(self.heads.bias, -8.0)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("slope", torch.ones(len(HEADS)))
        self.register_buffer("offset", torch.zeros(len(HEADS)))

    @staticmethod
    def numbers(similarity, installed, section, maintainer, *rest):
        """Returns [Q, K0, NUMBERS]: `installed`, `section` and `maintainer` are lists, `rest` are the remaining inputs of
        `forward`."""
        installed_rest, section_rest, maintainer_rest, number, item_rest, installed_origins, origin, *columns = rest
        linked, roots, strongest = matched(installed, number)
        of_section, of_maintainer = matched(section, number)[0], matched(maintainer, number)[0]
        sums = torch.stack([installed_rest.sum(1), (section_rest + maintainer_rest).sum(1)], -1)
        history_left, sides_left = (item_rest @ sums).unbind(-1)
        total = linked + of_section + of_maintainer + history_left + sides_left
        root, total_root = (torch.sqrt(torch.relu(part) + 1e-4) for part in (linked, total))
        siblings, length = shared_origins(installed_origins, origin)
        known = installed[..., NEIGHBOURS].clamp(max=1).sum(1)
        links = (history_left, sides_left, linked, root, strongest, of_section, of_maintainer, total, total_root)
        numbers = [similarity * 8.0] + [part * 4.0 for part in links]
        numbers += [roots, torch.log(siblings + 1), siblings / (length.unsqueeze(1) + 1e-4) * 2.0]
        numbers += [torch.log(part + 1).unsqueeze(1) + 0 * similarity for part in (known, length)]
        return torch.stack([*numbers, *columns], -1)

    def ranked(self, numbers):
        hidden = self.dropout(torch.relu(self.second(torch.relu(self.first(numbers)))))
        return (self.heads(hidden) + numbers[..., self.DIRECT] @ self.direct) * self.slope + self.offset

    def forward(self, similarity, installed_lists, section_lists, maintainer_lists, installed_rest, section_rest, maintainer_rest,
                number, item_rest, installed_origins, origin, *columns):  # fmt: skip
        lists, rest = (installed_lists, section_lists, maintainer_lists), (installed_rest, section_rest, maintainer_rest)
        return self.ranked(self.numbers(similarity, *lists, *rest, number, item_rest, installed_origins, origin, *columns))


def text_vectors(items, seed):
    """Returns latent semantic vectors of name and descriptions, [N, 32], unit rows."""
    text = items.name.str.replace("-", " ") + " " + items.name + " " + items.short + " " + items.long.str[:600]
    words = TfidfVectorizer(sublinear_tf=True, min_df=5, max_df=0.2, stop_words="english", max_features=60000)
    x = TruncatedSVD(TEXT, random_state=seed).fit_transform(words.fit_transform(text))
    return (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)).astype(np.float32)


class Model:
    """Tables and towers, and the conversion of users and items to their inputs."""

    def __init__(self, data, seed):
        torch.manual_seed(seed)
        self.data, items, users = data, data.items, data.users
        self.vocabularies = {
            "sections": Vocabulary(pd.concat([items.section, users.section])),
            "maintainers": Vocabulary(pd.concat([items.maintainer, users.maintainer]), 3),
            "multi_arch": Vocabulary(items.multi_arch),
            "tags": Vocabulary([tag for tags in items.tags for tag in tags], 5),
        }
        single = lambda table, values: (table, self.vocabularies[table].bags([[v] for v in values]))
        self.user_bags = [single("sections", users.section), single("maintainers", users.maintainer)]
        self.item_bags = [
            single("sections", items.section),
            single("maintainers", items.maintainer),
            single("multi_arch", items.multi_arch),
            ("tags", self.vocabularies["tags"].bags(items.tags)),
        ]
        widths = {"sections": CATEGORY, "maintainers": CATEGORY, "multi_arch": CATEGORY, "tags": TAG}
        make = lambda rows, width: nn.Parameter(torch.randn(rows, width) * 0.05)
        self.tables = {"packages": make(data.item_count, D)}
        self.tables |= {name: make(len(self.vocabularies[name].values), width) for name, width in widths.items()}
        self.tables["texts"] = torch.from_numpy(text_vectors(items, seed))
        self.origins = origin_codes(items.source, seed)
        self.user = Tower([D, TEXT, CATEGORY, CATEGORY])
        self.item = Tower([D, TEXT, CATEGORY, CATEGORY, CATEGORY, TAG])
        self.links = self.overarch = None

    def user_inputs(self, users, ids, lengths):
        """Returns inputs of users that have the given packages, one list after the other."""
        inputs = [pooled(self.tables[table], ids, lengths) for table in ("packages", "texts")]
        return inputs + [pooled(self.tables[table], *bags.take(users)) for table, bags in self.user_bags]

    def queries(self, users, histories):
        bags = Bags(histories)
        return self.user(*self.user_inputs(np.asarray(users), bags.ids, bags.lengths))

    def item_inputs(self, items):
        ids = torch.from_numpy(items)
        inputs = [F.embedding(ids, self.tables[table]) for table in ("packages", "texts")]
        return inputs + [pooled(self.tables[table], *bags.take(items)) for table, bags in self.item_bags]

    @torch.no_grad()
    def all_items(self):
        return torch.cat([self.item(*self.item_inputs(some)) for some in np.array_split(np.arange(self.data.item_count), 8)])

    def vocabulary_values(self):
        """Returns lines of the vocabularies by name; those of the links are package ids."""
        return {name: vocabulary.values for name, vocabulary in self.vocabularies.items()} | {"links": self.links.items.tolist()}

    def sides(self):
        """Returns the row of each user's section and maintainer, -1 for none, and the numbers of rows."""
        return [(np.where(bags.lengths > 0, np.append(bags.ids, -1)[bags.starts], -1), len(self.tables[table])) for table, bags in self.user_bags]

    @torch.no_grad()
    def numbers(self, similarity, users, histories, candidates, columns):
        """Returns the inputs of the OverArch for candidates [Q, K0] of users that have `histories` [Q, LENGTH], padded with
        -1."""
        sides = [torch.from_numpy(rows[users]) for rows, _ in self.sides()]
        origins = rows_or_zeros(self.origins, histories), self.origins[candidates]
        of_users, of_items = self.links.of_users(histories, sides), self.links.of_items(candidates)
        return OverArch.numbers(similarity, *of_users, *of_items, *origins, *columns[candidates].unbind(-1))

    def all_numbers(self, queries, users, histories, candidates, items, columns, block=32):
        found = []
        for at in range(0, len(queries), block):
            some = slice(at, at + block)
            similarity = (queries[some].unsqueeze(1) * items[candidates[some]]).sum(-1)
            found.append(self.numbers(similarity, users[some], histories[some], candidates[some], columns))
        return torch.cat(found)


def popularity_columns(data, edges, users):
    """Returns the numeric item columns of the OverArch, [N, 5]: the number of users per ten thousand that have an item, with
    any label and each."""
    _, item, labels = edges
    counts = [np.bincount(item, minlength=data.item_count)]
    counts += [np.bincount(item, weights=labels[:, n], minlength=data.item_count) for n in range(len(TASKS))]
    return (np.log1p(np.stack(counts, 1) * (1e4 / users)) / 5).astype(np.float32)


@torch.no_grad()
def softmax_gradients(queries, items, correction, ids, scores):
    """Returns the cross-entropy of queries whose item is in the same row, and its gradients with respect to queries and items.

    Written by hand because everything happens in place in `scores`: autograd would keep and move several copies of it.
    """
    count, ids = len(queries), torch.from_numpy(ids.astype(np.int32))
    torch.addmm(-correction[ids], queries, items.T, out=scores)
    same = ids[None] == ids[:count, None]
    same.fill_diagonal_(False)
    scores.masked_fill_(same, -1e4)
    scores -= scores.amax(1, keepdim=True)
    wanted = scores.diagonal().clone()
    sums = scores.exp_().sum(1)
    loss = (sums.log() - wanted).mean().item()
    scores *= (1 / (sums * count))[:, None]
    scores.diagonal().sub_(1 / count)
    return loss, scores @ items, scores.T @ queries


class TowerTrainer:
    """Sampled softmax over the edges of some users."""

    def __init__(self, model, edges, seed):
        self.model, self.rng = model, np.random.default_rng(seed)
        self.user, self.item, _ = edges
        order = np.argsort(self.user, kind="stable")
        self.user, self.item = self.user[order], self.item[order]
        lists = np.split(self.item, np.flatnonzero(np.diff(self.user)) + 1)
        self.row = np.full(len(model.data.users), -1)
        self.row[self.user[np.concatenate([[0], np.flatnonzero(np.diff(self.user)) + 1])]] = np.arange(len(lists))
        self.histories = Bags(lists)
        self.popularity = np.bincount(self.item, minlength=model.data.item_count).astype(np.float64)
        self.keep = np.minimum(1, np.sqrt(300 / np.maximum(self.popularity[self.item], 1)))

    def sampled(self, users, wanted):
        """Samples a part of each user's packages without the one to be predicted: ids, and the number of each user."""
        ids, lengths = self.histories.take(self.row[users])
        owner = np.repeat(np.arange(len(users)), lengths)
        kept = ids != wanted[owner]
        rest = np.bincount(owner[kept], minlength=len(users))
        share = np.where(rest > 2, self.rng.uniform(0.5, 1, len(users)), 1)
        share = np.minimum(share, HISTORY_MAX / np.maximum(rest, 1))
        kept &= self.rng.random(len(ids)) < share[owner]
        return ids[kept], np.bincount(owner[kept], minlength=len(users))

    def train(self, epochs, peaks, temperature, batch=2048, negatives=2048):
        """Trains the towers; `peaks` are the highest learning rates of the packages' table and of the rest."""
        model, rng, items = self.model, self.rng, self.model.data.item_count
        rest = [t for n, t in model.tables.items() if n not in ("packages", "texts")]
        rest += [*model.user.parameters(), *model.item.parameters(), temperature]
        optimiser = torch.optim.Adam([{"params": [model.tables["packages"]]}, {"params": rest}], fused=True)
        steps = epochs * (int(self.keep.sum() / batch) + 1) + 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, list(peaks), total_steps=steps + epochs, pct_start=0.1)
        share = self.popularity / self.popularity.sum() * batch
        correction = torch.from_numpy((0.7 * np.log(share + negatives / items)).astype(np.float32))
        scores = torch.empty(batch, batch + negatives)
        for epoch in range(epochs):
            order = rng.permutation(np.flatnonzero(rng.random(len(self.item)) < self.keep))
            losses, start = [], time.time()
            for at in range(0, len(order) - batch // 2, batch):
                pick = order[at : at + batch]
                users, wanted = self.user[pick], self.item[pick]
                ids = np.concatenate([wanted, rng.integers(0, items, negatives)])
                queries = model.user(*model.user_inputs(users, *self.sampled(users, wanted)))
                queries = queries * temperature.exp().clamp(max=50)
                vectors = model.item(*model.item_inputs(ids))
                loss, *gradients = softmax_gradients(queries.detach(), vectors.detach(), correction, ids, scores[: len(pick), : len(ids)])
                optimiser.zero_grad()
                torch.autograd.backward([queries, vectors], gradients)
                optimiser.step()
                schedule.step()
                losses.append(loss)
            print(f"towers: epoch {epoch + 1} of {epochs}, loss {np.mean(losses):.3f}, {time.time() - start:.0f} s", flush=True)


@torch.no_grad()
def retrieve(model, items, users, histories, k):
    """Returns the best k items of each user without its history, best first, and its query."""
    tops, queries = [], []
    for at in range(0, len(users), 256):
        some = histories[at : at + 256]
        query = model.queries(users[at : at + 256], some)
        scores = query @ items.T
        for row, history in zip(scores, some):
            row[history] = -9
        tops.append(scores.topk(k, 1).indices.numpy())
        queries.append(query)
    return np.concatenate(tops), torch.cat(queries)


def examples(model, items, users, labels, rng, depth=1000, nearest=128, others=64):
    """Returns lists to rank: of each user a fifth is hidden; candidates are all hidden items that the towers retrieve, the
    nearest others, and a sample of the rest, uniform over the logarithm of the rank. The last part is the logarithm of the
    number of candidates that each of them represents."""
    histories = []
    for user in users:
        history = model.data.history[user]
        kept = rng.random(len(history)) < 0.8
        kept[rng.integers(len(history))] = False
        histories.append(history[kept])
    top, queries = retrieve(model, items, users, histories, depth)
    ranks = np.arange(1, depth + 1)
    stands_for = np.where(ranks > nearest, np.maximum(1, ranks * (1 / ranks[nearest:]).sum() / others), 1)
    chosen, wanted, counts = [], [], []
    for at in range(0, len(users), 256):
        rows = top[at : at + 256]
        truth = labels(users[at : at + 256], rows)
        related = truth.any(-1)
        weight = rng.gumbel(size=rows.shape) - np.log(ranks) + 200 * related
        weight[:, :nearest] += 100
        pick = np.argpartition(-weight, nearest + others, 1)[:, : nearest + others]
        chosen.append(np.take_along_axis(rows, pick, 1))
        wanted.append(np.take_along_axis(truth, pick[..., None], 1).astype(np.uint8))
        counts.append(np.take_along_axis(np.where(related, 0, np.log(stands_for)), pick, 1).astype(np.float32))
    return queries, padded(histories), *(torch.from_numpy(np.concatenate(part)) for part in (chosen, wanted, counts))


def with_related(labels):
    """Adds a fifth label: any of the four."""
    labels = torch.as_tensor(labels, dtype=torch.float32)
    return torch.cat([labels, labels.amax(-1, keepdim=True)], -1)


def train_overarch(model, items, columns, users, labels, seed, splits, epochs, batch=256, rate=2e-3):
    """Trains with a listwise softmax over the candidates of a user, every user with equal weight, and a cross-entropy for the
    scale."""
    torch.manual_seed(seed)
    rng, model.overarch = np.random.default_rng(seed + 1), OverArch()
    parts = []
    for _ in range(splits):
        queries, histories, *rest = examples(model, items, users, labels, rng)
        parts.append((model.all_numbers(queries, users, histories, rest[0], items, columns), *rest[1:]))
    numbers, wanted, counts = (torch.cat(part) for part in zip(*parts))
    optimiser = torch.optim.AdamW(model.overarch.parameters(), lr=rate, weight_decay=0.01)
    steps = epochs * math.ceil(len(numbers) / batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    share = torch.tensor([0.125] * len(TASKS) + [0.5])
    for epoch in range(epochs):
        losses, start = [], time.time()
        for pick in torch.from_numpy(rng.permutation(len(numbers))).split(batch):
            truth, logits = with_related(wanted[pick]), model.overarch.ranked(numbers[pick])
            count = counts[pick].unsqueeze(-1)
            positives = truth.sum(1)
            listwise = -(F.log_softmax(logits + count, 1) * truth).sum(1) / positives.clamp(min=1)
            listwise = listwise.sum(0) / (positives > 0).sum(0).clamp(min=1)
            pointwise = F.binary_cross_entropy_with_logits(logits, truth, weight=count.exp())
            loss = pointwise + (listwise * share).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        print(f"overarch: epoch {epoch + 1} of {epochs}, loss {np.mean(losses):.4f}, {time.time() - start:.0f} s", flush=True)
    model.overarch.eval()


class Validation:
    """Candidates that the towers retrieve for validation users; computes the recall of any order of them."""

    def __init__(self, model, items, columns):
        data = self.data = model.data
        users = data.validation_users
        self.top, self.queries = retrieve(model, items, users, data.histories(users), 1000)
        self.hidden = data.hidden_sets(users)
        self.truth = with_related(Labels(data.hidden_edges, data.item_count)(users, self.top))
        candidates = torch.from_numpy(self.top)
        numbers = model.all_numbers(self.queries, users, padded(data.histories(users)), candidates, items, columns)
        self.similarity = (numbers[..., 0] / 8).numpy()
        with torch.no_grad():
            self.logits = model.overarch.ranked(numbers)

    def recall(self, value):
        order = np.argsort(-value, 1, kind="stable")
        return recall(np.take_along_axis(self.top, order, 1), self.hidden, 20)

    def report(self, when):
        alone, ranked = recall(self.top, self.hidden, 20), self.recall(self.logits[..., -1].numpy())
        print(f"validation, {when}: recall@20 retrieval {alone:.4f}, reranked {ranked:.4f} ({100 * (ranked / alone - 1):+.1f} %)", flush=True)


def calibrate(model, validation):
    """Fits Platt's slope and offset of each head on validation users; returns their task scores."""
    slope, offset = (nn.Parameter(x) for x in (torch.ones(len(HEADS)), torch.zeros(len(HEADS))))
    fit = torch.optim.LBFGS([slope, offset], max_iter=100)

    def closure():
        fit.zero_grad()
        loss = F.binary_cross_entropy_with_logits(validation.logits * slope + offset, validation.truth)
        loss.backward()
        return loss

    fit.step(closure)
    model.overarch.slope.copy_(slope.detach())
    model.overarch.offset.copy_(offset.detach())
    scores = torch.sigmoid(validation.logits * slope.detach() + offset.detach()).numpy()
    for n, head in enumerate(HEADS):
        print(f"calibration of {head}: predicted {scores[..., n].mean():.5f}, observed {validation.truth[..., n].mean():.5f}")
    return scores


def choose_weights(validation, scores):
    """Chooses the weights of the value model, one after the other, each the best of a few on validation users."""
    steps = {"similarity": (0, 2, 4, 6, 8, 10, 12)} | {task: (0, 0.05, 0.1, 0.2, 0.5) for task in TASKS}
    weights = {name: 0.0 for name in (*TASKS, "similarity")}

    def value(tried):
        tasks = sum(tried[task] * scores[..., n] for n, task in enumerate(TASKS))
        return (scores[..., -1] + tasks) * np.exp(tried["similarity"] * (validation.similarity - 1))

    for name, some in 2 * list(steps.items()):
        tried = [(validation.recall(value(weights | {name: weight})), -weight) for weight in some]
        weights[name] = float(-max(tried)[1])
    print(f"validation: full pass recall@20 {validation.recall(value(weights)):.4f} with weights {weights}")
    return weights


def export_graph(module, inputs, path, names, outputs, pairs=()):
    """Writes a graph whose first axis is dynamic, and whose second is too if the name is one of `pairs`."""
    free = {name: {0: "Q", 1: "K0"} if name in pairs else {0: "Q"} for name in (*names, *outputs)}
    torch.onnx.export(
        module.eval(), inputs, path, input_names=names, output_names=outputs, opset_version=17, dynamo=False, dynamic_axes=free
    )
    onnx.checker.check_model(onnx.load(path))


def export(model, columns, weights, out):
    """Writes graphs, tables (in f16), vocabularies, items, requests and model.toml."""
    data = model.data
    tables = {name: t.detach().numpy().astype(np.float16) for name, t in model.tables.items()}
    tables |= {name: rows for name, (rows, _) in model.links.tables().items()} | {"origins": encoded(model.origins.numpy(), 2)}
    save_file(tables, out / "tables.safetensors")
    for name, values in model.vocabulary_values().items():
        (out / f"{name}.txt").write_text("".join(f"{v}\n" for v in values))
    some = data.test_users[:2]
    bags = Bags(data.histories(some))
    names = ["installed", "installed_text", "section", "maintainer"]
    export_graph(model.user, tuple(model.user_inputs(some, bags.ids, bags.lengths)), out / "user.onnx", names, ["query"])
    names = ["id", "text", "section", "maintainer", "multi_arch", "tags"]
    export_graph(model.item, tuple(model.item_inputs(np.arange(2))), out / "item.onnx", names, ["item"])
    of_user = {"installed": (LENGTH, NEIGHBOURS), "section": (1, SIDE_NEIGHBOURS), "maintainer": (1, SIDE_NEIGHBOURS)}
    inputs = {"similarity": (3,)} | {f"{name}_lists": (length, 3 * width) for name, (length, width) in of_user.items()}
    inputs |= {f"{name}_rest": (length, REST) for name, (length, _) in of_user.items()} | {"number": (3, 2), "item_rest": (3, REST)}
    inputs |= {"installed_origins": (LENGTH, ORIGIN), "origin": (3, ORIGIN)} | {name: (3,) for name in COLUMNS}
    pairs = ("similarity", "number", "item_rest", "origin", *COLUMNS, "logits")
    examples = tuple(torch.zeros(2, *shape) for shape in inputs.values())
    export_graph(model.overarch, examples, out / "overarch.onnx", list(inputs), ["logits"], pairs)
    kept = ["id", "name", "short", "section", "priority", "architecture", "multi_arch", "maintainer", "size_bucket"]
    items = data.items[kept + ["installed_kb", "tags", "essential"]].copy()
    for n, name in enumerate(COLUMNS):
        items[name] = columns[:, n].numpy()
    table = pa.Table.from_pandas(items, preserve_index=False)
    pq.write_table(table, out / "items.parquet", compression="zstd", compression_level=19)
    (out / "model.toml").write_text(model_toml(model, list(items.columns), weights))
    with open(out / "heldout.jsonl", "w") as file:
        for user in data.test_users:
            history, source = data.history[user].tolist(), data.users.iloc[user]
            features = {"installed": history} | {name: source[name] for name in ("section", "maintainer") if source[name]}
            line = {"user": source.source, "features": features, "exclude": history, "held": data.hidden[user].tolist()}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def model_toml(model, columns, weights):
    def entry(heading, **fields):
        quoted = (f"{k} = {json.dumps(v)}\n" for k, v in fields.items() if v is not None)
        return f"[[{heading}]]\n" + "".join(quoted) + "\n"

    def feature(side, name, kind, table, column=None, **sequence):
        pooling = {"pooling": "none", **sequence} if sequence else {"pooling": "sum"}
        return entry(f"{side}.features", name=name, kind=kind, table=table, **pooling, max_ids=4096, column=column)

    text = '# Written by python/train_debian.py.\nname = "debian"\n'
    text += f'description = "Given the packages I have, which others belong with them?"\ndimension = {D}\n\n'
    for name in ("packages", "texts", *model.vocabularies):
        vocabulary = f"{name}.txt" if name in model.vocabularies else None
        text += entry("tables", name=name, file="tables.safetensors", unseen="zero", vocabulary=vocabulary)
    for name, (_, vocabulary) in model.links.tables().items():
        text += entry("tables", name=name, file="tables.safetensors", format="int8", unseen="zero", vocabulary=f"{vocabulary}.txt")
    text += entry("tables", name="origins", file="tables.safetensors", format="int2", unseen="zero")
    text += '[user]\ntower = "user.onnx"\n\n'
    text += feature("user", "installed", "ids", "packages") + feature("user", "installed_text", "ids", "texts", "installed")
    text += feature("user", "section", "category", "sections") + feature("user", "maintainer", "category", "maintainers")
    for kind in ("lists", "rest"):
        for column, length in (("installed", LENGTH), ("section", 1), ("maintainer", 1)):
            text += feature("user", f"{column}_{kind}", "category", f"{column}_{kind}", column, length=length, keep="first")
    text += feature("user", "installed_origins", "ids", "origins", "installed", length=LENGTH, keep="first")
    text += '[item]\ntower = "item.onnx"\n\n'
    text += feature("item", "id", "ids", "packages") + feature("item", "text", "ids", "texts", "id")
    for name, table in (("section", "sections"), ("maintainer", "maintainers"), ("multi_arch", "multi_arch"), ("tags", "tags")):
        text += feature("item", name, "category", table)
    text += "".join(entry("item.columns", name=n, filter=n not in ("name", "short")) for n in columns if n != "id")
    text += "".join(entry("tasks", name=head) for head in HEADS)
    text += '[overarch]\ngraph = "overarch.onnx"\n\n'
    text += feature("overarch", "number", "category", "numbers", "id") + feature("overarch", "item_rest", "category", "item_rest", "id")
    text += feature("overarch", "origin", "ids", "origins", "id")
    terms = " + ".join(["related"] + [f"w_{task} * {task}" for task in TASKS])
    text += f'[value]\nexpression = "({terms}) * exp(w_similarity * (similarity - 1))"\n\n[value.constants]\n'
    return text + "".join(f"w_{name} = {weight}\n" for name, weight in weights.items())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--tuning-epochs", type=int, default=2)
    parser.add_argument("--splits", type=int, default=10, help="times that each reserved user's packages are split again")
    parser.add_argument("--overarch-epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    o = parser.parse_args()
    start, seed = time.time(), o.seed
    torch.set_num_threads(o.threads)
    o.out.mkdir(parents=True, exist_ok=True)
    data = debian_data.load(o.data, seed)
    print(
        f"{data.item_count} items, {len(data.train_users)} training users with {len(data.train_edges[0])} edges, "
        f"{len(data.validation_users)} validation and {len(data.test_users)} test users ({data.repeats_dropped} repeats dropped)"
    )
    model = Model(data, seed)
    temperature = nn.Parameter(torch.tensor(math.log(14.0)))
    shuffled = np.random.default_rng(seed).permutation(data.train_users)
    reserved, first = np.split(shuffled, [int(len(shuffled) * RESERVED_SHARE)])
    of_first = np.isin(data.train_edges[0], first)
    edges = tuple(part[of_first] for part in data.train_edges)
    TowerTrainer(model, edges, seed).train(o.epochs, (6e-3, 2e-3), temperature)
    items, columns = model.all_items(), torch.from_numpy(popularity_columns(data, edges, len(first)))
    model.links = Links(data, edges, first, model.sides(), seed)
    labels = Labels(data.train_edges, data.item_count)
    train_overarch(model, items, columns, reserved, labels, seed, o.splits, o.overarch_epochs)
    Validation(model, items, columns).report("towers and links of four fifths")

    TowerTrainer(model, data.train_edges, seed + 1).train(o.tuning_epochs, (2e-3, 5e-4), temperature)
    model.links = Links(data, data.train_edges, data.train_users, model.sides(), seed)
    columns = torch.from_numpy(popularity_columns(data, data.train_edges, len(data.train_users)))
    validation = Validation(model, model.all_items(), columns)
    validation.report("tuned")
    weights = choose_weights(validation, calibrate(model, validation))
    export(model, columns, weights, o.out)
    evaluate_debian.evaluate(o.out, data, golden=True)
    print(f"{time.time() - start:.0f} s in all, {time.process_time():.0f} s of processor time")


if __name__ == "__main__":
    main()
