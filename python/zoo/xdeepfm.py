"""xDeepFM as reranker: Lian et al. 2018, arXiv 1803.05170."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

from . import dcn
from .shop import D, mlp

FIELDS = 4


class XDeepFm(nn.Module):
    """Fields ``[Q, K0, 4, D]`` (user, item, price, popularity): first order, a compressed interaction network of two layers, and a
    network; in addition the similarity of retrieval.

    A layer of the interaction network multiplies each of its rows with each field, number by number, and a convolution of width 1
    compresses the products to rows; sums of the rows are the features.
    """

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(D, D), nn.Linear(D, D)
        self.price, self.popularity = (nn.Parameter(torch.randn(D) * 0.1) for _ in range(2))
        self.layers = nn.ModuleList([nn.Conv1d(FIELDS * FIELDS, 8, 1), nn.Conv1d(8 * FIELDS, 8, 1)])
        self.order1, self.crossed, self.deep = nn.Linear(2 * D + 2, 2), nn.Linear(16, 2), mlp(FIELDS * D, 64, 32, 2)
        self.direct = nn.Parameter(torch.full((2,), 8.0))

    def forward(self, query: torch.Tensor, item: torch.Tensor, price: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        user = query.unsqueeze(1).expand_as(item)
        price, popularity = (torch.log(price) - 3).unsqueeze(-1), (popularity - 4).unsqueeze(-1)
        each = torch.stack([self.user(user), self.item(item), price * self.price, popularity * self.popularity], 2)
        first = each.reshape(-1, FIELDS, D)
        rows, sums = first, []
        for layer in self.layers:
            products = torch.einsum("bhd,bmd->bhmd", rows, first).reshape(-1, layer.in_channels, D)
            rows = torch.relu(layer(products))
            sums.append(rows.sum(-1))
        crossed = torch.cat(sums, -1).reshape(item.shape[0], item.shape[1], 16)
        plain = self.order1(torch.cat([user, item, price, popularity], -1))
        similarity = (user * item).sum(-1, keepdim=True)
        return plain + self.crossed(crossed) + self.deep(each.flatten(2)) + similarity * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    dcn.make(out, program, XDeepFm, "xDeepFM as reranker")
