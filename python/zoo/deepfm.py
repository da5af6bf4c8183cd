"""DeepFM as reranker: Guo et al. 2017, arXiv 1703.04247."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

from . import dcn
from .shop import D, mlp


class DeepFm(nn.Module):
    """Fields ``[Q, K0, 4, D]`` (user, item, price, popularity): first order, all products of two fields, and a network;
    in addition the similarity of retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(D, D), nn.Linear(D, D)
        self.price, self.popularity = (nn.Parameter(torch.randn(D) * 0.1) for _ in range(2))
        self.order1 = nn.Linear(2 * D + 2, 2)
        self.deep = mlp(4 * D, 64, 32, 2)
        self.order2, self.direct = nn.Parameter(torch.ones(2)), nn.Parameter(torch.full((2,), 8.0))

    def forward(self, query: torch.Tensor, item: torch.Tensor, price: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        user = query.unsqueeze(1).expand_as(item)
        price, popularity = (torch.log(price) - 3).unsqueeze(-1), (popularity - 4).unsqueeze(-1)
        fields = torch.stack([self.user(user), self.item(item), price * self.price, popularity * self.popularity], 2)
        total = fields.sum(2)
        products = 0.5 * (total * total - (fields * fields).sum(2)).sum(-1, keepdim=True)
        plain = self.order1(torch.cat([user, item, price, popularity], -1))
        similarity = (user * item).sum(-1, keepdim=True)
        return plain + products * self.order2 + self.deep(fields.flatten(2)) + similarity * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    dcn.make(out, program, DeepFm, "DeepFM as reranker")
