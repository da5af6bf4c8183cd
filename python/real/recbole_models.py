"""Models of RecBole 1.2, unchanged. The rows that a server looks up replace their item embedding."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

WIDTH, LENGTH, FIELDS = 64, 50, 16


def _imported(kind: str, name: str) -> Any:
    """Imports a model; RecBole imports modules that only its training uses, and for names that NumPy 2 has dropped."""
    for old, new in {"long": np.int64, "bool": np.bool_, "float": np.float64, "bool8": np.bool_, "float_": np.float64}.items():
        if not hasattr(np, old):
            setattr(np, old, new)
    for missing in ("tensorboard", "torch.utils.tensorboard"):
        sys.modules.setdefault(missing, types.ModuleType(missing))
    sys.modules["torch.utils.tensorboard"].SummaryWriter = object
    return getattr(__import__(f"recbole.model.{kind}.{name.lower()}", fromlist=[name]), name)


class Config(dict):
    """Configuration of a model: None for keys that are not set."""

    def __missing__(self, key: str) -> None:
        return None


BASE = Config(
    USER_ID_FIELD="user", ITEM_ID_FIELD="item", LIST_SUFFIX="_list", ITEM_LIST_LENGTH_FIELD="item_length", NEG_PREFIX="neg_",
    MAX_ITEM_LIST_LENGTH=LENGTH, device="cpu", loss_type="CE", hidden_size=WIDTH, embedding_size=WIDTH, initializer_range=0.1,
    LABEL_FIELD="label", numerical_features=[],
)  # fmt: skip
TRANSFORMER = dict(n_layers=2, n_heads=2, inner_size=256, hidden_dropout_prob=0.5, attn_dropout_prob=0.5, hidden_act="gelu", layer_norm_eps=1e-12)
SEQUENTIAL: dict[str, dict[str, Any]] = {
    "SASRec": TRANSFORMER,
    "BERT4Rec": TRANSFORMER | dict(mask_ratio=0.2, MASK_ITEM_SEQ="m", POS_ITEMS="p", NEG_ITEMS="n", MASK_INDEX="i"),
    "GRU4Rec": dict(hidden_size=128, num_layers=1, dropout_prob=0.3),
    "NARM": dict(hidden_size=128, n_layers=1, dropout_probs=[0.25, 0.5]),
    "STAMP": {},
    "NextItNet": dict(block_num=5, dilations=[1, 4], kernel_size=3, reg_weight=1e-5),
    "Caser": dict(nh=8, nv=4, reg_weight=1e-4, dropout_prob=0.4),
}
CONTEXT: dict[str, dict[str, Any]] = {
    "xDeepFM": dict(mlp_hidden_size=[128, 128, 128], reg_weight=5e-4, dropout_prob=0.2, direct=False, cin_layer_size=[100, 100, 100]),
    "DCNV2": dict(mixed=False, structure="parallel", cross_layer_num=3, mlp_hidden_size=[256, 256], reg_weight=2, dropout_prob=0.2),
    "AutoInt": dict(attention_size=16, dropout_probs=[0.2, 0.2, 0.2], n_layers=3, num_heads=2, mlp_hidden_size=[128, 128], has_residual=True),
    "DeepFM": dict(mlp_hidden_size=[128, 128, 128], dropout_prob=0.2),
    "WideDeep": dict(mlp_hidden_size=[128, 128], dropout_prob=0.1),
}


class Dataset:
    """Dataset of a model: fields of tokens with 10 values each."""

    def __init__(self) -> None:
        from recbole.utils import FeatureType

        self.user_num = 10
        self.names = [f"f{n}" for n in range(FIELDS)]
        self.field2type = dict.fromkeys(self.names, FeatureType.TOKEN)

    def fields(self, **_: Any) -> list[str]:
        return self.names

    def num(self, _: str) -> int:
        return 10


class Rows(nn.Module):
    """An item embedding that returns the rows which a server has looked up; ``hold`` says which."""

    held: list[torch.Tensor] = []

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.held[-1]


@contextmanager
def hold(rows: torch.Tensor) -> Iterator[None]:
    Rows.held.append(rows)
    try:
        yield
    finally:
        Rows.held.pop()


class Sequential(nn.Module):
    """A sequential model as user tower: its own ``forward`` over the rows of a history."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.model = _imported("sequential_recommender", name)(Config(BASE | SEQUENTIAL[name]), Dataset())
        self.model.item_embedding = Rows()
        if name == "Caser":
            self.model.user_embedding = nn.Identity()

    def forward(self, history: torch.Tensor, history_mask: torch.Tensor) -> torch.Tensor:
        ids, lengths = history_mask.long(), history_mask.sum(1).long().clamp(min=1)
        with hold(history):
            if self.name == "BERT4Rec":
                return self.model.gather_indexes(self.model(ids), lengths - 1)
            if self.name == "Caser":
                return self.model(history[:, :1], ids)
            if self.name == "NextItNet":
                return self.model(ids)
            return self.model(ids, lengths)


class Unmasked(Sequential):
    """A model that reads zeros as padding and no mask."""

    def forward(self, history: torch.Tensor) -> torch.Tensor:
        return super().forward(history, torch.ones_like(history[..., 0]))


class Context(nn.Module):
    """A model of fields as reranker: half of the fields are of the user, half of the candidate."""

    def __init__(self, name: str):
        super().__init__()
        self.model = _imported("context_aware_recommender", name)(Config(BASE | {"embedding_size": 16} | CONTEXT[name]), Dataset())
        # The first-order weights of all fields, as one more number per field: the first of each row.
        self.model.first_order_linear = First()
        for part in self.model.parameters():
            part.data.mul_(0.2 if name == "DCNV2" else 1.0)  # RecBole draws its cross layers so wide that every score would be 0 or 1.
        self.model.concat_embed_input_fields = lambda interaction: Rows.held[-1]
        self.model.embed_input_fields = lambda interaction: (None, Rows.held[-1])

    def forward(self, *fields: torch.Tensor) -> torch.Tensor:
        user, item = fields[: FIELDS // 2], fields[FIELDS // 2 :]
        lead = item[0].shape[:2]
        rows = torch.stack([*(one.unsqueeze(1).expand(-1, lead[1], -1) for one in user), *item], 2)
        with hold(rows.reshape(-1, FIELDS, rows.shape[-1])):
            return self.model(None).reshape(lead[0], lead[1], 1)


class First(nn.Module):
    def forward(self, _: Any) -> torch.Tensor:
        return Rows.held[-1][..., 0].sum(1, keepdim=True)
