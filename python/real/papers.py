"""Models written in PyTorch from their papers, because no PyPI package contains them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, LENGTH, HEADS = 64, 50, 4


class HstuBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distance = nn.Parameter(torch.randn(HEADS, LENGTH) * 0.1)
        self.register_buffer("back", (torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)).clamp(min=0))

    def forward(self, x: torch.Tensor, reach: torch.Tensor) -> torch.Tensor:
        heads = lambda part: part.reshape(x.shape[0], LENGTH, HEADS, -1).transpose(1, 2)  # noqa: E731
        gate, value, query, key = F.silu(self.project(self.before(x))).split(WIDTH, -1)
        weights = F.silu(heads(query) @ heads(key).transpose(2, 3) + self.distance[:, self.back]) * reach
        gathered = (weights @ heads(value)).transpose(1, 2).reshape(x.shape[0], LENGTH, WIDTH)
        return x + self.out(self.between(gathered) * gate)


class Hstu(nn.Module):
    """HSTU as user tower: Zhai et al. 2024, arXiv 2402.17152, without times."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.blocks = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1), nn.ModuleList(HstuBlock() for _ in range(2))
        self.register_buffer("earlier", torch.full((LENGTH, LENGTH), 1 / LENGTH).tril())

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        x, reach = history + self.places, self.earlier * history_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, reach)
        return x[torch.arange(x.shape[0]), (history_mask.sum(1).long() - 1).clamp(min=0)]


class Din(nn.Module):
    """DIN as reranker: Zhou et al. 2018, arXiv 1706.06978."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(4 * WIDTH, 80), nn.PReLU(), nn.Linear(80, 40), nn.PReLU(), nn.Linear(40, 1))
        self.deep = nn.Sequential(nn.Linear(3 * WIDTH, 200), nn.PReLU(), nn.Linear(200, 80), nn.PReLU(), nn.Linear(80, 1))

    def forward(self, query: torch.Tensor, item: torch.Tensor, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        lead = (item.shape[0], item.shape[1], LENGTH, WIDTH)
        past, target = history.unsqueeze(1).expand(lead), item.unsqueeze(2).expand(lead)
        weights = self.unit(torch.cat([past, target, past - target, past * target], -1)).squeeze(-1) * history_mask.unsqueeze(1)
        interest = (weights.unsqueeze(-1) * past).sum(2)
        return self.deep(torch.cat([query.unsqueeze(1).expand_as(item), interest, item], -1))


class Mol(nn.Module):
    """Mixture of logits as reranker: Zhai et al. 2023, arXiv 2306.04039, over 8 x 4 parts of query and item."""

    def __init__(self) -> None:
        super().__init__()
        mlp = lambda a, b: nn.Sequential(nn.Linear(a, 128), nn.SiLU(), nn.Linear(128, b))  # noqa: E731
        self.user, self.item = nn.Linear(WIDTH, 8 * 32), nn.Linear(WIDTH, 4 * 32)
        self.gates = nn.ModuleList([mlp(WIDTH, 32), mlp(WIDTH, 32), mlp(32, 32)])

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        users = F.normalize(self.user(query).reshape(-1, 8, 32), dim=-1, eps=1e-6)
        items = F.normalize(self.item(item).reshape(item.shape[0], item.shape[1], 4, 32), dim=-1, eps=1e-6)
        logits = torch.einsum("qkid,qud->qkiu", items, users).flatten(2)
        gate = self.gates[0](query).unsqueeze(1) * self.gates[1](item) + self.gates[2](logits)
        return (torch.softmax(gate, -1) * logits).sum(-1, keepdim=True)
