"""Shared code of the zoo's models: tables, plain towers, training, golden answers."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import sterling
import torch
import torch.nn.functional as F
from torch import nn

from .world import BRANDS, CATEGORIES, ITEMS, LENGTH, SEGMENTS, USERS, World

D = 16
# Towers learn from the first users, rerankers from the next, whom the towers have not seen; the rest is held out.
TOWERS, RERANKERS = 4500, 7000
# Held-out users whose answers are stored, and the number of items of each.
SAMPLES, GOLDEN_ITEMS = [7100, 7101, 7102, 7103], 24


def mlp(*widths: int) -> nn.Sequential:
    """Returns linear layers with a ReLU between them."""
    layers: list[nn.Module] = []
    for n, (a, b) in enumerate(zip(widths, widths[1:])):
        layers += [nn.ReLU()] * (n > 0) + [nn.Linear(a, b)]
    return nn.Sequential(*layers)


class MeanUser(nn.Module):
    """A user as the mean of the history, and a segment: ``[Q, D]`` at length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(D + 4, 32, D)

    def forward(self, history: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(torch.cat([history, segment], -1)) + history, dim=-1, eps=1e-6)


class PlainItem(nn.Module):
    """An item by its id, category and brand: ``[N, D]`` at length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(D + 16, 32, D)

    def forward(self, item_id: torch.Tensor, category: torch.Tensor, brand: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(torch.cat([item_id, category, brand], -1)) + item_id, dim=-1, eps=1e-6)


class Shop:
    """The synthetic world, its tables, and the conversion of users and items to inputs of towers."""

    def __init__(self, seed: int = 1):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.world = World(seed)
        sizes = {"item": (ITEMS, D), "category": (CATEGORIES, 8), "brand": (BRANDS, 8), "segment": (SEGMENTS, 4)}
        self.tables = nn.ModuleDict({name: nn.Embedding(*size) for name, size in sizes.items()})
        for table in self.tables.values():
            nn.init.normal_(table.weight, std=0.3)
        world = self.world
        self.category, self.brand, self.segment = map(torch.from_numpy, (world.category, world.brand, world.segment))
        self.history, self.next, self.bought = map(torch.from_numpy, (world.history, world.next, world.bought))
        self.price, self.popularity = (torch.from_numpy(x.astype(np.float32)) for x in (world.price, world.popularity))

    def vocabularies(self, *names: str) -> dict[str, Any]:
        """Returns these tables as arguments of `sterling.export`."""
        letters = {"category": "c", "brand": "b", "segment": "s"}
        tables = {name: self.tables[name] for name in names}
        with_values = {name: sterling.Table(table, vocabulary=[f"{letters[name]}{n}" for n in range(len(table.weight))])
                       for name, table in tables.items() if name in letters}  # fmt: skip
        return tables | with_values

    def user_inputs(self, users: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the inputs of `MeanUser`."""
        return self.tables["item"](self.history[users]).mean(1), self.tables["segment"](self.segment[users])

    def sequences(self, users: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns rows of the history ``[Q, S, D]`` and its mask; histories are truncated at random, so that models also learn
        short ones."""
        lengths = torch.randint(1, LENGTH + 1, (len(users), 1))
        lengths = torch.where(torch.rand(len(users), 1) < 0.5, LENGTH, lengths)
        # Keeps the last `length` items, at the front: the next item follows the end of the history.
        at = torch.arange(LENGTH) + LENGTH - lengths
        mask = (at < LENGTH).float()
        rows = self.tables["item"](self.history[users].gather(1, at.clamp(max=LENGTH - 1)))
        return rows * mask.unsqueeze(-1), mask

    def item_inputs(self) -> tuple[torch.Tensor, ...]:
        """Returns the inputs of `PlainItem`, for all items."""
        return self.tables["item"].weight, self.tables["category"](self.category), self.tables["brand"](self.brand)

    def item_features(self) -> list[sterling.Feature]:
        """Returns the features of `PlainItem`."""
        category, brand = sterling.Category("category", "category"), sterling.Category("brand", "brand")
        return [sterling.Ids("item_id", "item", column="id"), category, brand]

    def train_towers(self, user: nn.Module, item: nn.Module, inputs: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        """Trains with the cross-entropy of the next item over all items."""
        temperature = nn.Parameter(torch.tensor(math.log(10.0)))

        def loss(users: torch.Tensor) -> torch.Tensor:
            query, items = (first(tower(*given)) for tower, given in ((user, inputs(users)), (item, self.item_inputs())))
            return F.cross_entropy(query @ items.T * temperature.exp(), self.next[users])

        fit(loss, [*user.parameters(), *item.parameters(), *self.tables.parameters(), temperature], (0, TOWERS), 600, 5e-3)

    def candidates(self, users: torch.Tensor, count: int = 100) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns items to rank ``[Q, count]``, the next one first, and the labels click and buy ``[Q, count, 2]``."""
        others = torch.randint(0, ITEMS, (len(users), count - 1))
        chosen = torch.cat([self.next[users].unsqueeze(1), others], 1)
        click = (chosen == self.next[users].unsqueeze(1)).float()
        return chosen, torch.stack([click, click * self.bought[users].unsqueeze(1)], -1)

    def held_out(self) -> torch.Tensor:
        """Returns users that no training sees."""
        return torch.arange(RERANKERS, USERS)


def first(made: Any) -> torch.Tensor:
    """Returns the query output of a tower with several outputs."""
    return next(iter(made.values())) if isinstance(made, dict) else made


def fit(loss: Callable[[torch.Tensor], torch.Tensor], parameters: Iterable[nn.Parameter], users: tuple[int, int], steps: int, rate: float) -> None:
    """Runs Adam over random batches of these users, with a learning rate that falls to zero."""
    optimiser = torch.optim.Adam(parameters, lr=rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(torch.randint(*users, (256,))).backward()
        optimiser.step()
        schedule.step()


def ranking_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sums the softmax loss of the clicked candidate, and the calibration of both tasks."""
    listwise = F.cross_entropy(logits[..., 0], torch.zeros(len(logits), dtype=torch.int64))
    return listwise + F.binary_cross_entropy_with_logits(logits, labels)


def hit_rate(scores: torch.Tensor, wanted: torch.Tensor, k: int = 20) -> float:
    """Returns the share of users whose next item is among the best k of all items."""
    return (scores.topk(k, 1).indices == wanted.unsqueeze(1)).any(1).float().mean().item()


def train_reranker(shop: Shop, overarch: nn.Module, given: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
    """Trains an OverArch on the inputs that ``given`` returns for users and their candidates."""

    def loss(users: torch.Tensor) -> torch.Tensor:
        chosen, labels = shop.candidates(users)
        with torch.no_grad():
            inputs = given(users, chosen)
        return ranking_loss(overarch(*inputs), labels)

    fit(loss, overarch.parameters(), (TOWERS, RERANKERS), 250, 3e-3)


@torch.no_grad()
def figures(shop: Shop, query: torch.Tensor, items: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor] | None = None) -> dict[str, float]:
    """Returns hit rates of held-out users with given queries, before and after a reranker of all items."""
    held = shop.held_out()
    found = {"hit@20 retrieval": hit_rate(query @ items.T, shop.next[held])}
    if logits:
        ranked = torch.cat([logits(some)[..., 0] for some in held.split(50)])
        found["hit@20 reranked"] = hit_rate(ranked, shop.next[held])
    return found


def every_item(users: torch.Tensor) -> torch.Tensor:
    """Returns all items as candidates of each user."""
    return torch.arange(ITEMS).expand(len(users), -1)


def write_golden(exported: sterling.Exported, samples: list[dict[str, Any]], items: list[dict[str, Any]], figures: dict[str, float]) -> None:
    """Writes the expected answers of a server, computed by PyTorch: queries, and similarity and task scores of some items."""
    reference, cases = exported.reference, []
    for sample in samples:
        scores = reference.scores(sample, items)
        best = np.argsort(-scores["similarity"], kind="stable")[:GOLDEN_ITEMS]
        found = [{name: round(float(values[n]), 7) for name, values in scores.items()} for n in best]
        entries = [{"id": items[n]["id"], "similarity": one.pop("similarity"), "tasks": one} for n, one in zip(best, found)]
        query = [round(float(x), 7) for x in reference.queries([sample]).ravel()]
        cases.append({"features": sample, "query": query, "items": entries})
    text = json.dumps({"figures": {name: round(x, 4) for name, x in figures.items()}, "requests": cases}, separators=(",", ":"))
    pathlib.Path(exported.path / "golden.json").write_text(text.replace('},{"features"', '},\n{"features"') + "\n")
    size = sum(file.stat().st_size for file in exported.path.iterdir())
    print(f"{exported}; {size / 1000:.0f} kB; {figures}", flush=True)
