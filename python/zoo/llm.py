"""A user tower built as a large language model: the blocks of Llama, Touvron et al. 2023, arXiv 2302.13971, with grouped-query
attention, Ainslie et al. 2023, arXiv 2305.13245."""

from __future__ import annotations

import pathlib

import torch
import torch.nn.functional as F
from torch import nn

from . import sasrec
from .shop import D
from .world import LENGTH

HEADS, GROUPS, WIDTH = 4, 2, 8


class Block(nn.Module):
    """RMSNorm, rotary grouped-query attention and a SwiGLU network, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.query, self.key, self.value = (nn.Linear(D, count * WIDTH, bias=False) for count in (HEADS, GROUPS, GROUPS))
        self.out = nn.Linear(HEADS * WIDTH, D, bias=False)
        self.gate, self.up, self.down = nn.Linear(D, 40, bias=False), nn.Linear(D, 40, bias=False), nn.Linear(40, D, bias=False)
        angles = torch.arange(LENGTH).unsqueeze(1) * 100.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angles.sin()] * 2, -1))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.cos + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = lambda part, count: part.reshape(-1, LENGTH, count, WIDTH).transpose(1, 2)  # noqa: E731
        normal = self.before(x)
        query = self.rotated(heads(self.query(normal), HEADS))
        key, value = self.rotated(heads(self.key(normal), GROUPS)), heads(self.value(normal), GROUPS)
        # Later positions are hidden, so those after the last item change no earlier one.
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(-1, LENGTH, HEADS * WIDTH))
        normal = self.between(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Llm(nn.Module):
    """Maps ``history`` ``[Q, S, D]`` with its mask to ``query`` ``[Q, D]``: the state of two blocks at the last item."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(Block(), Block()), nn.RMSNorm(D, eps=1e-5)
        self.nobody = nn.Parameter(torch.randn(D) * 0.1)

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        # 1 at the last position with an item: there the mask falls to 0.
        last = history_mask - torch.cat([history_mask[:, 1:], history_mask[:, :1] * 0], 1)
        encoded = (self.norm(self.blocks(history * 4)) * last.unsqueeze(-1)).sum(1)
        return F.normalize(encoded + self.nobody, dim=-1, eps=1e-6)


def make(out: pathlib.Path, program: pathlib.Path | None) -> None:
    """Trains and exports the model."""
    sasrec.make(out, program, Llm, "A language model's blocks")
