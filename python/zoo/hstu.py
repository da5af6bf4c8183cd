"""Pointwise aggregated attention as user tower, as in HSTU: Zhai et al. 2024, arXiv 2402.17152."""

from __future__ import annotations

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from . import sasrec
from .shop import D
from .world import LENGTH

HEADS = 2


class Block(nn.Module):
    """Attention without a softmax, so that the strength of the history is not normalized away, gated by the position itself.

    As in the paper, one projection with SiLU makes gate, values, queries and keys; the aggregate is normalized before the gate,
    and there is no separate network. The bias depends on the distance of positions; times are not known here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(D), nn.LayerNorm(D)
        self.project, self.out = nn.Linear(D, 4 * D), nn.Linear(D, D)
        self.distance = nn.Parameter(torch.zeros(HEADS, LENGTH))
        back = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
        self.register_buffer("back", back.clamp(min=0))

    def forward(self, x: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        heads = lambda part: part.reshape(-1, LENGTH, HEADS, D // HEADS).transpose(1, 2)  # noqa: E731
        gate, value, query, key = F.silu(self.project(self.before(x))).split(D, -1)
        weights = F.silu(heads(query) @ heads(key).transpose(2, 3) + self.distance[:, self.back]) * reach
        gathered = (weights @ heads(value)).transpose(1, 2).reshape(-1, LENGTH, D)
        return x + self.out(self.between(gathered) * gate)


class Hstu(sasrec.Sequence):
    """With weights of 1 over the length for earlier positions, and 0 for others."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("earlier", torch.full((LENGTH, LENGTH), 1 / LENGTH).tril())

    def reach(self, history_mask: torch.Tensor) -> torch.Tensor:
        return self.earlier * history_mask.unsqueeze(1).unsqueeze(1)


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    sasrec.make(out, program, Hstu, "HSTU")
