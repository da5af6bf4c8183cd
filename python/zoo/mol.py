"""Mixture of Logits as reranker: Zhai et al. 2023, arXiv 2306.04039."""

from __future__ import annotations

import pathlib

import sterling
import torch
import torch.nn.functional as F
from torch import nn

from .shop import D, SAMPLES, TOWERS, MeanUser, PlainItem, Shop, every_item, figures, fit, mlp, write_golden
from .world import ITEMS

USER_PARTS, ITEM_PARTS, WIDTH = 4, 4, 8


class UserParts(nn.Module):
    """A plain user tower that also outputs several vectors of the user: ``user_parts`` ``[Q, 4, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.parts = MeanUser(), mlp(D + 4, 32, USER_PARTS * WIDTH)

    def forward(self, history: torch.Tensor, segment: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self.parts(torch.cat([history, segment], -1)).reshape(-1, USER_PARTS, WIDTH)
        return {"query": self.plain(history, segment), "user_parts": F.normalize(parts, dim=-1, eps=1e-6)}


class ItemParts(nn.Module):
    """A plain item tower that also outputs several vectors of the item, concatenated: ``parts`` ``[N, 32]``."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.parts = PlainItem(), mlp(D + 16, 32, ITEM_PARTS * WIDTH)

    def forward(self, item_id: torch.Tensor, category: torch.Tensor, brand: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self.parts(torch.cat([item_id, category, brand], -1)).reshape(-1, ITEM_PARTS, WIDTH)
        parts = F.normalize(parts, dim=-1, eps=1e-6).reshape(-1, ITEM_PARTS * WIDTH)
        return {"item": self.plain(item_id, category, brand), "parts": parts}


class Mixture(nn.Module):
    """The cosines of all pairs of user and item vectors, weighted by a gate over user, item and cosines."""

    def __init__(self) -> None:
        super().__init__()
        pairs = USER_PARTS * ITEM_PARTS
        self.user_gate, self.item_gate, self.pair_gate = mlp(D, 32, pairs), mlp(D, 32, pairs), mlp(pairs, 32, pairs)
        self.scale, self.offset = nn.Parameter(torch.tensor(10.0)), nn.Parameter(torch.tensor(-5.0))

    def forward(self, query: torch.Tensor, user_parts: torch.Tensor, item: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        each = parts.reshape(parts.shape[0], -1, ITEM_PARTS, WIDTH)
        cosines = (each @ user_parts.unsqueeze(1).transpose(2, 3)).flatten(2)
        gate = self.user_gate(query).unsqueeze(1) * self.item_gate(item) + self.pair_gate(cosines)
        return (torch.softmax(gate, -1) * cosines).sum(-1, keepdim=True) * self.scale + self.offset


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model: towers, vectors and mixture together, over all items."""
    shop, user, item, overarch = Shop(), UserParts(), ItemParts(), Mixture()
    temperature = 10.0

    def logits(users: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        of_users, of_items = user(*shop.user_inputs(users)), item(*shop.item_inputs())
        chosen = every_item(users)
        mixed = overarch(of_users["query"], of_users["user_parts"], of_items["item"][chosen], of_items["parts"][chosen])
        return of_users["query"] @ of_items["item"].T * temperature, mixed

    def loss(users: torch.Tensor) -> torch.Tensor:
        plain, mixed = logits(users)
        wanted = F.one_hot(shop.next[users], ITEMS).float()
        calibration = F.binary_cross_entropy_with_logits(mixed.squeeze(-1), wanted)
        return F.cross_entropy(plain, shop.next[users]) + F.cross_entropy(mixed.squeeze(-1), shop.next[users]) + calibration

    fit(loss, [*user.parameters(), *item.parameters(), *overarch.parameters(), *shop.tables.parameters()], (0, TOWERS), 500, 5e-3)
    with torch.no_grad():
        query, items = user(*shop.user_inputs(shop.held_out()))["query"], item(*shop.item_inputs())["item"]
    found = figures(shop, query, items, lambda users: logits(users)[1])
    rows, samples = shop.world.rows(), shop.world.samples(SAMPLES, "history", "segment")
    features = {"user": [sterling.Ids("history", "item", "mean"), sterling.Category("segment", "segment")], "item": shop.item_features()}
    exported = sterling.export(
        out, description="Mixture of Logits as reranker", user=user, item=item, overarch=overarch, features=features,
        item_vectors=[sterling.ItemVector("parts", ITEM_PARTS * WIDTH)], samples=samples, items=rows, program=program or False,
        tables=shop.vocabularies("item", "category", "brand", "segment"), tasks=["click"], value="click",
    )  # fmt: skip
    write_golden(exported, samples, rows, found)
