"""DLRM as reranker: Naumov et al. 2019, arXiv 1906.00091, of the modules of TorchRec where it is installed."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

from . import dcn
from .shop import D, mlp

try:
    from torchrec.models.dlrm import DenseArch, InteractionArch, OverArch
except ImportError:

    class DenseArch(nn.Module):  # type: ignore[no-redef]
        """Linear layers, each with a ReLU."""

        def __init__(self, in_features: int, layer_sizes: list[int]):
            super().__init__()
            self.model = nn.Sequential(mlp(in_features, *layer_sizes), nn.ReLU())

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.model(features)

    class InteractionArch(nn.Module):  # type: ignore[no-redef]
        """The dense row ``[B, D]``, followed by the products of any two of it and the ``F`` sparse rows ``[B, F, D]``."""

        def __init__(self, num_sparse_features: int):
            super().__init__()
            self.register_buffer("pairs", torch.triu_indices(num_sparse_features + 1, num_sparse_features + 1, 1))

        def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
            rows = torch.cat([dense_features.unsqueeze(1), sparse_features], 1)
            products = torch.bmm(rows, rows.transpose(1, 2))
            return torch.cat([dense_features, products[:, self.pairs[0], self.pairs[1]]], 1)

    class OverArch(nn.Module):  # type: ignore[no-redef]
        """Linear layers with a ReLU between them."""

        def __init__(self, in_features: int, layer_sizes: list[int]):
            super().__init__()
            self.model = mlp(in_features, *layer_sizes)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.model(features)


class Dlrm(nn.Module):
    """Numbers (price, popularity) through the dense arch, and the interactions of its row, the user and the item through the over
    arch; in addition the similarity of retrieval."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(D, D), nn.Linear(D, D)
        self.dense, self.interaction, self.over = DenseArch(2, [32, D]), InteractionArch(2), OverArch(D + 3, [64, 32, 2])
        self.direct = nn.Parameter(torch.full((2,), 8.0))

    def forward(self, query: torch.Tensor, item: torch.Tensor, price: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        user = query.unsqueeze(1).expand_as(item)
        numbers = self.dense(torch.stack([torch.log(price) - 3, popularity - 4], -1).reshape(-1, 2))
        rows = torch.stack([self.user(user), self.item(item)], 2).reshape(-1, 2, D)
        made = self.over(self.interaction(numbers, rows)).reshape(item.shape[0], item.shape[1], 2)
        return made + (user * item).sum(-1, keepdim=True) * self.direct


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    dcn.make(out, program, Dlrm, "DLRM as reranker")
