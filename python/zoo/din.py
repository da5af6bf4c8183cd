"""Target attention over the history, as in DIN: Zhou et al. 2018, arXiv 1706.06978."""

from __future__ import annotations

import pathlib

import sterling
import torch
from torch import nn

from .shop import D, SAMPLES, MeanUser, PlainItem, Shop, every_item, figures, mlp, train_reranker, write_golden
from .world import LENGTH


class TargetAttention(nn.Module):
    """Weights the history by its relevance for the candidate; then a network.

    The weight of a past item is a network of it, the candidate and their product. The first layer is a sum of three layers, which
    equals one layer over all three concatenated. As in the paper, weights are not normalized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.past, self.target, self.product = nn.Linear(D, 16), nn.Linear(D, 16, bias=False), nn.Linear(D, 16, bias=False)
        self.slope, self.weight = nn.PReLU(), nn.Linear(16, 1)
        self.deep, self.direct = mlp(5 * D + 2, 64, 32, 2), nn.Parameter(torch.full((2,), 8.0))

    def forward(
        self,
        query: torch.Tensor,
        item: torch.Tensor,
        past: torch.Tensor,
        past_mask: torch.Tensor,
        item_row: torch.Tensor,
        price: torch.Tensor,
        popularity: torch.Tensor,
    ) -> torch.Tensor:
        each, target = past.unsqueeze(1), item_row.unsqueeze(2)
        hidden = self.past(past).unsqueeze(1) + self.target(item_row).unsqueeze(2) + self.product(each * target * 4)
        weights = self.weight(self.slope(hidden)).squeeze(-1) * past_mask.unsqueeze(1)
        interest = weights @ past
        user = query.unsqueeze(1).expand_as(item)
        numbers = torch.stack([torch.log(price) - 3, popularity - 4], -1)
        deep = self.deep(torch.cat([user, item, user * item * 4, interest, interest * item_row, numbers], -1))
        return deep + (user * item).sum(-1, keepdim=True) * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    shop, user, item = Shop(), MeanUser(), PlainItem()
    shop.train_towers(user, item, shop.user_inputs)
    overarch = TargetAttention()
    with torch.no_grad():
        items = item(*shop.item_inputs())

    def given(users: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        past, mask = shop.sequences(users)
        row = shop.tables["item"](chosen)
        return user(*shop.user_inputs(users)), items[chosen], past, mask, row, shop.price[chosen], shop.popularity[chosen]

    train_reranker(shop, overarch, given)

    def logits(users: torch.Tensor) -> torch.Tensor:
        inputs = list(given(users, every_item(users)))
        inputs[2:4] = shop.tables["item"](shop.history[users]), torch.ones(len(users), LENGTH)
        return overarch(*inputs)

    with torch.no_grad():
        query = user(*shop.user_inputs(shop.held_out()))
    found = figures(shop, query, items, logits)
    rows, samples = shop.world.rows(), shop.world.samples(SAMPLES, "history", "segment")
    features = {
        "user": [
            sterling.Ids("history", "item", "mean"),
            sterling.Category("segment", "segment"),
            sterling.Ids("past", "item", "none", column="history", length=LENGTH),
        ],
        "item": shop.item_features(),
        "overarch": [sterling.Ids("item_row", "item", column="id")],
    }
    exported = sterling.export(
        out, description="Target attention over the history as reranker", user=user, item=item, overarch=overarch, features=features,
        tables=shop.vocabularies("item", "category", "brand", "segment"), samples=samples, items=rows, program=program or False,
        tasks=["click", "buy"], value="click + w_buy * buy", constants={"w_buy": 1.0},
    )  # fmt: skip
    write_golden(exported, samples, rows, found)
