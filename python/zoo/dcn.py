"""DCN-v2 as reranker: Wang et al. 2021, arXiv 2008.13535."""

from __future__ import annotations

import pathlib

import sterling
import torch
from torch import nn

from .shop import D, SAMPLES, MeanUser, PlainItem, Shop, every_item, figures, mlp, train_reranker, write_golden


class Cross(nn.Module):
    """Two cross layers, ``x0 * (W x + b) + x``, then a network on top (the stacked form), plus the similarity of retrieval."""

    def __init__(self) -> None:
        super().__init__()
        width = 3 * D + 2
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.deep, self.direct = mlp(width, 64, 32, 2), nn.Parameter(torch.full((2,), 8.0))

    def forward(self, query: torch.Tensor, item: torch.Tensor, price: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        user = query.unsqueeze(1).expand_as(item)
        numbers = torch.stack([torch.log(price) - 3, popularity - 4], -1)
        first = torch.cat([user, item, user * item * 4, numbers], -1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.deep(x) + (user * item).sum(-1, keepdim=True) * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None, kind: type[nn.Module] = Cross, said: str = "Cross network v2 as reranker") -> None:
    """Trains and exports the model."""
    shop, user, item = Shop(), MeanUser(), PlainItem()
    shop.train_towers(user, item, shop.user_inputs)
    overarch = kind()
    with torch.no_grad():
        items = item(*shop.item_inputs())

    def given(users: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return user(*shop.user_inputs(users)), items[chosen], shop.price[chosen], shop.popularity[chosen]

    train_reranker(shop, overarch, given)
    with torch.no_grad():
        query = user(*shop.user_inputs(shop.held_out()))
    found = figures(shop, query, items, lambda users: overarch(*given(users, every_item(users))))
    rows, samples = shop.world.rows(), shop.world.samples(SAMPLES, "history", "segment")
    features = {"user": [sterling.Ids("history", "item", "mean"), sterling.Category("segment", "segment")], "item": shop.item_features()}
    exported = sterling.export(
        out, description=said, user=user, item=item, overarch=overarch, features=features, samples=samples, items=rows,
        tables=shop.vocabularies("item", "category", "brand", "segment"), program=program or False,
        tasks=["click", "buy"], value="click + w_buy * buy", constants={"w_buy": 1.0},
    )  # fmt: skip
    write_golden(exported, samples, rows, found)
