"""The list of real models: each builds its module and says what `sterling.export` needs besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sterling import Dense, Ids
from torch import nn

LENGTH, ROWS, ITEMS = 50, 1000, 1500


@dataclass(frozen=True)
class Model:
    """A model: ``build`` returns the arguments of `sterling.export`, with seeded weights. ``source`` is its package, or the paper
    after which it is written."""

    name: str
    source: str
    build: Callable[[], dict[str, Any]]


def _width(tensor: torch.Tensor) -> list[dict[str, Any]]:
    return [{"id": n, "embedding": row} for n, row in enumerate(tensor.tolist())]


def _tower(module: nn.Module, width: int = 64) -> dict[str, Any]:
    """Returns the package of a user tower over the last 50 items."""
    table = torch.randn(ROWS, width) * 0.3
    history = [Ids("history", "items", "none", length=LENGTH)]
    with torch.no_grad():
        dimension = module.eval()(*_given(module, torch.zeros(1, LENGTH, width))).shape[-1]
    items = _width(torch.randn(ITEMS, dimension) * 0.3)
    return dict(user=module, tables={"items": table}, features={"user": history}, items=items)


def _given(module: nn.Module, history: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from sterling.graphs import parameters

    names = parameters("user", module) or {}
    return (history, torch.ones(history.shape[:2])) if "history_mask" in names else (history,)


def _ranker(module: nn.Module) -> dict[str, Any]:
    """Returns the package of a reranker over query, item and history."""
    return _tower(_Mean()) | dict(overarch=module, tasks=["click"])


class _Mean(nn.Module):
    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        return (history * history_mask.unsqueeze(-1)).sum(1) / history_mask.sum(1, keepdim=True).clamp(min=1)


class _First(nn.Module):
    def forward(self, u0: torch.Tensor) -> torch.Tensor:
        return u0


def _fields(module: nn.Module, user: int, item: int, width: int, numbers: int = 0) -> dict[str, Any]:
    """Returns the package of a reranker of fields ``u0...`` of the user and ``i0...`` of the item, after ``dense`` numbers."""
    names = [*(["dense"] if numbers else []), *(f"u{n}" for n in range(user)), *(f"i{n}" for n in range(item))]
    scope: dict[str, Any] = {"Base": nn.Module}
    source = f"class Ranker(Base):\n    def forward(self, {', '.join(names)}):\n        return self.module({', '.join(names)})\n"
    exec(source, scope)
    ranker = scope["Ranker"]()
    ranker.module = module
    rows = _width(torch.randn(ITEMS, width) * 0.3)
    for row in rows:
        row |= {f"column{n}": [(row["id"] * 7 + n) % ROWS] for n in range(item)}
    dense = [Dense("dense", numbers)] if numbers else []
    return dict(
        user=_First(), overarch=ranker, tasks=["click"], tables={"values": torch.randn(ROWS, width) * 0.3}, items=rows,
        features={"user": [*dense, *(Ids(f"u{n}", "values") for n in range(user))], "overarch": [Ids(f"i{n}", "values", column=f"column{n}") for n in range(item)]},
    )  # fmt: skip


def _recbole(name: str) -> dict[str, Any]:
    from . import recbole_models

    if name in recbole_models.SEQUENTIAL:
        kind = recbole_models.Unmasked if name in ("NextItNet", "Caser") else recbole_models.Sequential
        return _tower(kind(name))
    half = recbole_models.FIELDS // 2
    return _fields(recbole_models.Context(name), half, half, 16)


def _torchrec(name: str) -> dict[str, Any]:
    from . import torchrec_models

    half = torchrec_models.FIELDS // 2
    if name == "two-tower":
        return _two_towers(torchrec_models)
    return _fields(torchrec_models.Dlrm(name), half, half, torchrec_models.WIDTH, torchrec_models.DENSE)


def _two_towers(models: Any) -> dict[str, Any]:
    collection = models.collection(models.WIDTH, ["user", "article"])
    rows = [{"id": n, "article": n % 100} for n in range(ITEMS)]

    class User(models.Tower):
        def forward(self, user: torch.Tensor) -> torch.Tensor:
            return super().forward(user)

    class Item(models.Tower):
        def forward(self, article: torch.Tensor) -> torch.Tensor:
            return super().forward(article)

    return dict(user=User(), item=Item(), tables=collection, items=rows)


def _hugging_face(name: str) -> dict[str, Any]:
    from . import hugging_face

    return _tower(hugging_face.Tower(name))


def _paper(name: str) -> dict[str, Any]:
    from . import papers

    return _tower(papers.Hstu()) if name == "HSTU" else _ranker(papers.Din() if name == "DIN" else papers.Mol())


MODELS = [
    *(Model(name, "RecBole", lambda name=name: _recbole(name)) for name in (
        "SASRec", "BERT4Rec", "GRU4Rec", "NARM", "STAMP", "NextItNet", "Caser", "xDeepFM", "DCNV2", "AutoInt", "DeepFM", "WideDeep")),
    *(Model(name, "TorchRec", lambda name=name: _torchrec(name)) for name in ("DLRM", "DLRM-DCN", "two-tower")),
    *(Model(name, "transformers", lambda name=name: _hugging_face(name)) for name in ("BERT", "GPT-2", "Llama")),
    *(Model(name, "paper", lambda name=name: _paper(name)) for name in ("HSTU", "DIN", "MoL")),
]  # fmt: skip
