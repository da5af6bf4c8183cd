"""DCN-v2 as reranker: Wang et al. 2021, arXiv 2008.13535."""

from __future__ import annotations

import pathlib

import sterling
import torch
from torch import nn

from .shop import D, MeanUser, PlainItem, Shop, fit, hit_rate, mlp, ranking_loss, write_golden


class Cross(nn.Module):
    """Two cross layers, ``x0 * (W x + b) + x``, then a network on top (the stacked form)."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 * D + 2
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep = mlp(width, 64, 32, 2)

    def forward(self, query: torch.Tensor, item: torch.Tensor, price: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        user = query.unsqueeze(1).expand_as(item)
        numbers = torch.stack([torch.log(price) - 3, popularity - 4], -1)
        first = torch.cat([user, item, user * item, numbers], -1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.deep(x)


def make(out: pathlib.Path, program: pathlib.Path | None, overarch: nn.Module | None = None, said: str = "Cross network v2 as reranker") -> None:
    """Trains and exports the model."""
    shop, user, item, overarch = Shop(), MeanUser(), PlainItem(), overarch or Cross()
    shop.train_towers(user, item, shop.user_inputs)
    with torch.no_grad():
        items = item(*shop.item_inputs())

    def logits(users: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            query = user(*shop.user_inputs(users))
        return overarch(query, items[chosen], shop.price[chosen], shop.popularity[chosen])

    def loss(users: torch.Tensor) -> torch.Tensor:
        chosen, labels = shop.candidates(users)
        return ranking_loss(logits(users, chosen), labels)

    fit(loss, overarch.parameters(), 400, 3e-3)
    held = shop.held_out()
    with torch.no_grad():
        everything = torch.arange(len(items)).expand(len(held), -1)
        alone, ranked = user(*shop.user_inputs(held)) @ items.T, logits(held, everything)[..., 0]
    figures = {"hit@20 retrieval": hit_rate(alone, shop.next[held]), "hit@20 reranked": hit_rate(ranked, shop.next[held])}
    rows, samples = shop.world.rows(), shop.world.samples([3700, 3701, 3702, 3703], "history", "segment")
    features = {"user": [sterling.Ids("history", "item", "mean"), sterling.Category("segment", "segment")], "item": shop.item_features()}
    exported = sterling.export(
        out, description=said, user=user, item=item, overarch=overarch, features=features, samples=samples, items=rows,
        tables=shop.vocabularies("item", "category", "brand", "segment"), program=program or False,
        tasks=["click", "buy"], value="click + w_buy * buy", constants={"w_buy": 1.0},
    )  # fmt: skip
    write_golden(exported, samples, rows, figures)
