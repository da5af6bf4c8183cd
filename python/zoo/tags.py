"""Attention of the user over each candidate's tags: DIN (Zhou et al. 2018, arXiv 1706.06978) in the other direction."""

from __future__ import annotations

import pathlib

import sterling
import torch
from torch import nn

from .shop import D, SAMPLES, MeanUser, PlainItem, Shop, every_item, figures, mlp, train_reranker, write_golden
from .world import TAGS

# Shorter than the tags of some items: the last ones are kept.
LENGTH, WIDTH, HEADS = 4, 8, 2


class TagAttention(nn.Module):
    """Weights the candidate's tags by their relevance for the user, in two heads; then a network.

    For an item without tags, all logits are the same large negative number, so that the weights are uniform, over rows of zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.key, self.value = nn.Linear(D, HEADS * WIDTH), nn.Linear(WIDTH, HEADS * WIDTH), nn.Linear(WIDTH, HEADS * WIDTH, bias=False)
        self.deep, self.direct = mlp(3 * D + HEADS * WIDTH + 3, 64, 32, 2), nn.Parameter(torch.full((2,), 8.0))

    def forward(
        self,
        query: torch.Tensor,
        item: torch.Tensor,
        tags: torch.Tensor,
        tags_mask: torch.Tensor,
        price: torch.Tensor,
        popularity: torch.Tensor,
    ) -> torch.Tensor:
        users, candidates = item.shape[0], item.shape[1]
        asked = self.ask(query).reshape(users, 1, 1, HEADS, WIDTH)
        keys = self.key(tags).reshape(users, candidates, LENGTH, HEADS, WIDTH)
        values = self.value(tags).reshape(users, candidates, LENGTH, HEADS, WIDTH)
        logits = (asked * keys).sum(-1) * WIDTH**-0.5 + (tags_mask.unsqueeze(-1) - 1) * 1e4
        weights = torch.softmax(logits, 2) * tags_mask.unsqueeze(-1)
        interest = (weights.unsqueeze(-1) * values).sum(2).reshape(users, candidates, HEADS * WIDTH)
        user = query.unsqueeze(1).expand_as(item)
        numbers = torch.stack([torch.log(price) - 3, popularity - 4, tags_mask.sum(-1) - 2], -1)
        deep = self.deep(torch.cat([user, item, user * item * 4, interest, numbers], -1))
        return deep + (user * item).sum(-1, keepdim=True) * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    shop, user, item = Shop(), MeanUser(), PlainItem()
    shop.train_towers(user, item, shop.user_inputs)
    table, overarch = nn.Embedding(TAGS, WIDTH), TagAttention()
    nn.init.normal_(table.weight, std=0.5)
    rows, mask = torch.zeros(len(shop.world.tags), LENGTH, dtype=torch.int64), torch.zeros(len(shop.world.tags), LENGTH)
    for n, tags in enumerate(shop.world.tags):
        kept = torch.from_numpy(tags[-LENGTH:].copy())
        rows[n, : len(kept)], mask[n, : len(kept)] = kept, 1
    with torch.no_grad():
        items = item(*shop.item_inputs())

    def given(users: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tagged = table(rows[chosen]) * mask[chosen].unsqueeze(-1)
        return user(*shop.user_inputs(users)), items[chosen], tagged, mask[chosen], shop.price[chosen], shop.popularity[chosen]

    train_reranker(shop, overarch, given)
    with torch.no_grad():
        query = user(*shop.user_inputs(shop.held_out()))
    found = figures(shop, query, items, lambda users: overarch(*given(users, every_item(users))))
    samples = shop.world.samples(SAMPLES, "history", "segment")
    features = {
        "user": [sterling.Ids("history", "item", "mean"), sterling.Category("segment", "segment")],
        "item": shop.item_features(),
        "overarch": [sterling.Category("tags", "tag", "none", length=LENGTH)],
    }
    rows_of_items = shop.world.rows(with_tags=True)
    known = sterling.Table(table, vocabulary=[f"t{n:02}" for n in range(TAGS)])
    exported = sterling.export(
        out, description="Attention over each candidate's tags as reranker", user=user, item=item, overarch=overarch, features=features,
        tables=shop.vocabularies("item", "category", "brand", "segment") | {"tag": known}, samples=samples, items=rows_of_items,
        program=program or False, tasks=["click", "buy"], value="click + w_buy * buy", constants={"w_buy": 1.0},
    )  # fmt: skip
    write_golden(exported, samples, rows_of_items, found)
