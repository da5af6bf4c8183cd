"""GRU4Rec as user tower: Hidasi et al. 2016, arXiv 1511.06939."""

from __future__ import annotations

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from . import sasrec
from .shop import D


class Gru4Rec(nn.Module):
    """Maps ``history`` ``[Q, S, D]`` with its mask to ``query`` ``[Q, D]``: the state of a GRU after the last item."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(D, 2 * D, batch_first=True), nn.Linear(2 * D, D)
        self.nobody = nn.Parameter(torch.randn(D) * 0.1)

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        states, _ = self.gru(history * 4)
        # 1 at the last position with an item: there the mask falls to 0.
        last = history_mask - torch.cat([history_mask[:, 1:], history_mask[:, :1] * 0], 1)
        return F.normalize(self.out((states * last.unsqueeze(-1)).sum(1)) + self.nobody, dim=-1, eps=1e-6)


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    sasrec.make(out, program, Gru4Rec, "GRU4Rec")
