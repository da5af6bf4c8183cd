"""Models of TorchRec 1.9: the arches of DLRM and DLRM-DCN unchanged, and a two-tower model of its collections and MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.modules.mlp import MLP

WIDTH, FIELDS, DENSE = 64, 26, 13


def collection(width: int = WIDTH, names: list[str] | None = None) -> EmbeddingBagCollection:
    """Returns a collection of a table per field."""
    names = names or [f"f{n}" for n in range(FIELDS)]
    return EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name=f"t_{name}", embedding_dim=width, num_embeddings=100, feature_names=[name]) for name in names]
    )


class Dlrm(nn.Module):
    """TorchRec's DLRM as reranker. The numbers and half of the fields are of the user, the other half of the candidate."""

    def __init__(self, kind: str = "DLRM"):
        super().__init__()
        shared: dict[str, Any] = dict(embedding_bag_collection=collection(), dense_in_features=DENSE,
                                      dense_arch_layer_sizes=[512, 256, WIDTH], over_arch_layer_sizes=[512, 512, 256, 1])  # fmt: skip
        self.model: nn.Module = DLRM(**shared) if kind == "DLRM" else DLRM_DCN(**shared, dcn_num_layers=3, dcn_low_rank_dim=128)

    def forward(self, dense: torch.Tensor, *fields: torch.Tensor) -> torch.Tensor:
        user, item = fields[: FIELDS // 2], fields[FIELDS // 2 :]
        queries, count = item[0].shape[:2]
        sparse = torch.stack([*(one.unsqueeze(1).expand(-1, count, -1) for one in user), *item], 2).reshape(-1, FIELDS, WIDTH)
        numbers = self.model.dense_arch(dense).unsqueeze(1).expand(-1, count, -1).reshape(-1, WIDTH)
        return self.model.over_arch(self.model.inter_arch(numbers, sparse)).reshape(queries, count, 1)


class Tower(nn.Module):
    """A tower of TorchRec's two-tower example: the collection's output through an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = MLP(WIDTH, [128, 64])

    def forward(self, *fields: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat(fields, 1))
