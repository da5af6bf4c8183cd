"""BERT4Rec as user tower: Sun et al. 2019, arXiv 1904.06690."""

from __future__ import annotations

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from . import sasrec
from .shop import D
from .world import LENGTH


class Bert4Rec(nn.Module):
    """Maps ``history`` ``[Q, S, D]`` with its mask to ``query`` ``[Q, D]``: PyTorch's encoder in both directions over the items and,
    before them, a mask token in place of the next item, whose state is the query. Positions count from the newest item."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token, self.ages = nn.Parameter(torch.randn(1, 1, D) * 0.1), nn.Parameter(torch.randn(LENGTH, D) * 0.1)
        self.norm, self.out = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        # A one-hot row for the age of each item: 0 for the newest.
        age = history_mask.sum(1, keepdim=True) - 1 - torch.arange(LENGTH)
        ages = (age.unsqueeze(-1) == torch.arange(LENGTH)).float() @ self.ages
        x = torch.cat([self.token.expand(history.shape[0], 1, D), history * 4 + ages], 1)
        hidden = torch.cat([torch.zeros_like(history_mask[:, :1]), 1 - history_mask], 1) > 0.5
        return F.normalize(self.out(self.norm(self.encoder(x, src_key_padding_mask=hidden)[:, 0])), dim=-1, eps=1e-6)


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    sasrec.make(out, program, Bert4Rec, "BERT4Rec")
