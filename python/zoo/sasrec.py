"""SASRec as user tower: Kang and McAuley 2018, arXiv 1808.09781."""

from __future__ import annotations

import math
import pathlib

import sterling
import torch
import torch.nn.functional as F
from torch import nn

from .shop import D, SAMPLES, PlainItem, Shop, figures, mlp, write_golden
from .world import LENGTH

HEADS = 2


class Block(nn.Module):
    """Causal self-attention and a network, each with a layer norm before and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.network = mlp(D, 2 * D, D)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        heads = lambda part: part.reshape(-1, LENGTH, HEADS, D // HEADS).transpose(1, 2)  # noqa: E731
        normal = self.before(x)
        query, key, value = heads(self.query(normal)), heads(self.key(normal)), heads(self.value(normal))
        weights = torch.softmax(query @ key.transpose(2, 3) / math.sqrt(D // HEADS) + hidden, -1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(-1, LENGTH, D))
        return x + self.network(self.between(x))


class Sequence(nn.Module):
    """Maps ``history`` ``[Q, S, D]`` with its mask to ``query`` ``[Q, D]``: the output of two blocks at the last position.

    A block gets the positions ``[Q, S, D]`` and the attention mask that ``reach`` derives from the history mask.
    """

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LENGTH, D) * 0.1)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm, self.nobody = nn.LayerNorm(D), nn.Parameter(torch.randn(D) * 0.1)

    def reach(self, history_mask: torch.Tensor) -> torch.Tensor:
        """``[Q, 1, S, S]``."""
        raise NotImplementedError

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        reach = self.reach(history_mask)
        x = history * 4 + self.places
        for block in self.blocks:
            x = block(x, reach)
        # 1 at the last position with an item: there the mask falls to 0.
        last = history_mask - torch.cat([history_mask[:, 1:], history_mask[:, :1] * 0], 1)
        encoded = (self.norm(x) * last.unsqueeze(-1)).sum(1)
        return F.normalize(encoded + self.nobody, dim=-1, eps=1e-6)


class Sasrec(Sequence):
    """With a softmax over the earlier positions."""

    def __init__(self) -> None:
        super().__init__(Block)
        # Finite, so that a fully masked row has a softmax too.
        self.register_buffer("later", torch.full((LENGTH, LENGTH), -1e4).triu(1))

    def reach(self, history_mask: torch.Tensor) -> torch.Tensor:
        return self.later + ((history_mask - 1) * 1e4).unsqueeze(1).unsqueeze(1)


def make(out: pathlib.Path, program: pathlib.Path | None, kind: type[nn.Module] = Sasrec, said: str = "SASRec") -> None:
    """Trains and exports the model."""
    shop, user, item = Shop(), kind(), PlainItem()
    shop.train_towers(user, item, shop.sequences)
    held = shop.held_out()
    with torch.no_grad():
        items, rows_of = item(*shop.item_inputs()), shop.tables["item"](shop.history[held])
        found = figures(shop, user(rows_of, torch.ones(len(held), LENGTH)), items)
    rows, samples = shop.world.rows(), shop.world.samples(SAMPLES, "history")
    exported = sterling.export(
        out, description=f"{said} as user tower: what comes next after this history?", user=user, item=item,
        features={"user": [sterling.Ids("history", "item", "none", length=LENGTH)], "item": shop.item_features()},
        tables=shop.vocabularies("item", "category", "brand"), samples=samples, items=rows, program=program or False,
    )  # fmt: skip
    write_golden(exported, samples, rows, found)
