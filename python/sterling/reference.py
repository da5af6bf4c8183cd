"""Computes the expected answers of a server in PyTorch, from the exported modules: the complete pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ExportError
from .features import Dense, Feature, ItemVector, LookedUp, Query, is_missing, kept, listed
from .graphs import Graph
from .tables import Table, pooled, rows_of

if TYPE_CHECKING:
    import torch

_RUN_ITEMS = 4096


@dataclass
class Reference:
    """Modules and tables of a model package, with methods for the requests of a server.

    Rows are mappings: the features of a user as in a request, and the columns of an item as in an item file, including ``id``.
    """

    dimension: int
    tables: Mapping[str, Table]
    features: Mapping[str, Sequence[Feature]]
    tasks: Sequence[str] = ()
    user: Graph | None = None
    item: Graph | None = None
    overarch: Graph | None = None
    vectors: Sequence[ItemVector] = ()
    several: Sequence[Query] = ()
    merge: str = "union"
    _rows: dict[str, dict[str, int]] = field(default_factory=dict, repr=False)
    _tokenizers: dict[str, Any] = field(default_factory=dict, repr=False)

    def queries(self, users: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns query embeddings ``[users, D]``, or ``[users, Tq, D]``."""
        return self._user(users)["query"].numpy()

    def items(self, items: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Returns item embeddings ``[items, D]``."""
        return self._item(items)["item"].numpy()

    def scores(self, user: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
        """Returns the ``similarity`` of a user and each item, and the score of each task; each has shape ``[items]``.

        Several queries are merged as if each of them found every item.
        """
        import torch

        made = self._user([user])
        parts = [self._score(user, made, items[at : at + _RUN_ITEMS]) for at in range(0, len(items), _RUN_ITEMS)]
        joined = torch.cat(parts, 1)
        return {name: joined[n].numpy() for n, name in enumerate(("similarity", *self.tasks))}

    def _score(self, user: Mapping[str, Any], made: Mapping[str, torch.Tensor], items: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        import torch

        vectors = self._item(items)
        weights = torch.tensor([query.weight for query in self.several] or [1.0])
        similarity = (made["query"].reshape(-1, self.dimension) @ vectors["item"].T) * weights.unsqueeze(1)
        similarity = similarity.amax(0) if self.merge == "union" else similarity.sum(0)
        if self.overarch is None:
            return similarity[None]
        user_inputs = self._inputs("user", [user])
        item_inputs = self._inputs("overarch", items)
        given = {}
        for port in self.overarch.inputs:
            name = port.name
            if name == "similarity":
                given[name] = similarity[None]
            elif name in made:
                given[name] = made[name]
            elif name in user_inputs:
                given[name] = user_inputs[name]
            elif name in vectors:
                given[name] = vectors[name][None]
            elif name in item_inputs:
                given[name] = item_inputs[name][None]
            else:
                given[name] = torch.tensor([[number(name, row) for row in items]])
        logits = self.overarch(**given)["logits"][0]
        return torch.cat([similarity[None], torch.sigmoid(logits).T])

    def _user(self, users: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if self.user is None:
            raise ExportError("user: this model has no user tower; requests have a vector")
        given = self._inputs("user", users)
        return self.user(**{port.name: given[port.name] for port in self.user.inputs})

    def _item(self, items: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        if self.item is None:
            made = {"item": _vectors("embedding", self.dimension, items)}
        else:
            given = self._inputs("item", items)
            made = self.item(**{port.name: given[port.name] for port in self.item.inputs})
        own = {v.name: _vectors(v.column, v.width, items) for v in self.vectors if v.column}
        made |= own
        return made | {v.name: _stored(made[v.name], v.format) for v in self.vectors}

    def _inputs(self, side: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        given: dict[str, torch.Tensor] = {}
        if side == "overarch":
            sources = {feature.source for feature in self.features.get(side, ())}
            is_set = lambda name, value: name in sources and isinstance(value, (list, tuple, np.ndarray))  # noqa: E731
            rows = [{name: kept(value) if is_set(name, value) else value for name, value in row.items()} for row in rows]
        for feature in self.features.get(side, ()):
            if isinstance(feature, Dense):
                given[feature.name] = torch.stack([dense(feature, row) for row in rows])
            elif isinstance(feature, LookedUp) and feature.is_sequence:
                length = feature.length or 0
                cut = [self._ids(feature, row)[slice(-length, None) if feature.keep == "last" else slice(length)] for row in rows]
                found = torch.zeros(len(rows), length, self.tables[feature.table].weight.shape[1])
                mask = torch.zeros(len(rows), length)
                for n, ids in enumerate(cut):
                    found[n, : len(ids)] = self._lookup(feature, ids)
                    mask[n, : len(ids)] = 1
                given |= {feature.name: found, f"{feature.name}_mask": mask}
            elif isinstance(feature, LookedUp):
                given[feature.name] = torch.stack([self._pooled(feature, row) for row in rows])
        return given

    def _pooled(self, feature: LookedUp, row: Mapping[str, Any]) -> torch.Tensor:
        ids = self._ids(feature, row)
        sent = row.get(feature.source)
        weights = [float(weight) for weight in sent["weights"]] if isinstance(sent, Mapping) and "weights" in sent else None
        table = self.tables[feature.table]
        # The row of an unknown id, zeros, adds nothing to a sum, but counts in a mean.
        known = [(row, n) for n, row in enumerate(self._known(feature, ids)) if row is not None]
        weights = None if weights is None else [weights[n] for _, n in known]
        made = pooled(feature.table, table, feature.pooling or "sum", [row for row, _ in known], weights)
        return made * (len(known) / len(ids)) if feature.pooling == "mean" and ids else made

    def _ids(self, feature: LookedUp, row: Mapping[str, Any]) -> list[int]:
        values = listed(feature, row)
        table = self.tables[feature.table]
        if feature.kind == "ids" and table.ids is None:
            return values
        if feature.kind == "text":
            return self._tokens(feature, values)
        if feature.table not in self._rows:
            named = table.vocabulary or () if table.ids is None else map(str, table.ids.tolist())
            self._rows[feature.table] = {value: n for n, value in enumerate(named)}
        return [self._rows[feature.table].get(str(value), -1) for value in values]

    def _tokens(self, feature: LookedUp, values: Sequence[str]) -> list[int]:
        """Returns the ids of a text's tokens."""
        try:
            from tokenizers import Tokenizer
        except ImportError as e:
            raise ExportError(f"feature `{feature.name}`: texts need the package `tokenizers`: {e}") from None
        if not values:
            return []
        if len(values) > 1:
            raise ExportError(f"feature `{feature.name}`: {len(values)} texts, expected one")
        if feature.table not in self._tokenizers:
            self._tokenizers[feature.table] = Tokenizer.from_str(self.tables[feature.table].tokenizer)
        tokenizer = self._tokenizers[feature.table]
        tokenizer.no_padding()
        tokenizer.enable_truncation(feature.length, direction="right" if feature.keep == "first" else "left")
        return tokenizer.encode(values[0]).ids

    def _known(self, feature: LookedUp, ids: Sequence[int]) -> list[int | None]:
        """Returns the row of each id; None for an id outside the table that counts as zeros."""
        table = self.tables[feature.table]
        is_known = [0 <= row < len(table.weight) for row in ids]
        if not all(is_known) and table.unseen == "hash":
            raise ExportError(f"feature `{feature.name}`: an id outside table `{feature.table}`, which hashes such ids, is not supported in PyTorch")
        instead = int(table.unseen.removeprefix("row:")) if table.unseen.startswith("row:") else None
        return [row if known else instead for row, known in zip(ids, is_known)]

    def _lookup(self, feature: LookedUp, ids: Sequence[int]) -> torch.Tensor:
        import torch

        table, known = self.tables[feature.table], self._known(feature, ids)
        found = torch.zeros(len(ids), table.weight.shape[1])
        at = [n for n, row in enumerate(known) if row is not None]
        found[at] = rows_of(feature.table, table, [row for row in known if row is not None])
        return found


def dense(feature: Dense, row: Mapping[str, Any]) -> torch.Tensor:
    """Returns the numbers of a dense feature, ``[width]``."""
    import torch

    values = listed(feature, row) or [0.0] * feature.width
    if len(values) != feature.width:
        raise ExportError(f"feature `{feature.name}`: {len(values)} numbers, expected {feature.width}")
    return torch.tensor(values, dtype=torch.float32)


def number(name: str, row: Mapping[str, Any]) -> float:
    """Returns the number in a column of an item: 0 without a value, the smallest of several values."""
    value = row.get(name)
    try:
        several = value if isinstance(value, (list, tuple, np.ndarray)) else [value]
        numbers = [] if is_missing(value) else [float(one) for one in several]
    except (TypeError, ValueError):
        raise ExportError(f"overarch: forward takes the column `{name}`, but item {row.get('id')} has {value!r}, expected a number") from None
    return min(numbers, default=0.0)


def _stored(rows: torch.Tensor, format: str) -> torch.Tensor:
    """Rounds rows to a storage format; int8 rows are not rounded here."""
    import torch

    types = {"f16": torch.float16, "bf16": torch.bfloat16}
    return rows.to(types[format]).float() if format in types else rows


def _vectors(column: str | None, width: int, rows: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    import torch

    for row in rows:
        if len(row.get(column, ())) != width:
            raise ExportError(f"item {row.get('id')}: `{column}` has {len(row.get(column, ()))} numbers, expected {width}")
    return torch.tensor([list(row[column]) for row in rows], dtype=torch.float32)
