"""What graphs read and what items keep, as ``model.toml`` declares it (``models/README.md``).

A feature's name is the graph's input. Lookups stand outside: what a graph sees of `Ids` and `Category` is the pooled embedding
``[Q, width of the table]``; with ``pooling="none"`` the rows ``[Q, length, width]``, and ``NAME_mask`` ``[Q, length]``, 1 where there
is a value. Of `Dense` it sees the numbers ``[Q, width]``. An OverArch sees those of each candidate, ``[Q, K0, ...]``, whose values
are those that an item column keeps: each once, ascending.

>>> Ids("installed", table="packages").declared()
{'name': 'installed', 'kind': 'ids', 'table': 'packages', 'pooling': 'sum'}
>>> Dense("age", width=2, column="user_age").declared()
{'name': 'age', 'kind': 'dense', 'width': 2, 'column': 'user_age'}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .errors import ExportError

POOLINGS = ("sum", "mean", "none")
KEPT = ("last", "first")
MERGES = ("union", "intersection", "weighted")
FORMATS = ("f32", "f16", "bf16", "int8")
MAX_IDS = 4096


def one_of(what: str, given: str, known: tuple[str, ...]) -> str:
    """The value, where it is one of those known."""
    if given not in known:
        raise ExportError(f"{what} `{given}`, expected one of: {', '.join(known)}")
    return given


class Feature:
    """One input of a graph; `Ids`, `Category` and `Dense` are the kinds there are.

    ``column`` is the request's field or the item's column that brings the values, where it is not called like the feature.
    """

    name: str
    column: str | None
    kind: ClassVar[str] = ""

    @property
    def source(self) -> str:
        """The request field or item column that brings the values."""
        return self.column or self.name

    def declared(self) -> dict[str, Any]:
        """The feature's entry of ``model.toml``."""
        return {"name": self.name, "kind": self.kind}


@dataclass(frozen=True)
class LookedUp(Feature):
    """A feature whose rows are looked up in a table: pooled, or kept as a sequence of ``length`` rows."""

    name: str
    table: str
    pooling: str | None = None
    """``sum``, ``mean`` or ``none``; without it the table's own, where an ``nn.EmbeddingBag`` or a TorchRec collection says it, else ``sum``."""
    max_ids: int = MAX_IDS
    column: str | None = None
    length: int | None = None
    """Of a sequence: its rows; what is longer is cut."""
    keep: str = "last"
    """Of a sequence: which values stay of more than ``length``, the ``last`` or the ``first``."""
    weights: bool = True
    """Whether weights of ids multiply their rows; False drops them, as an unweighted ``EmbeddingBagCollection`` does."""

    @property
    def is_sequence(self) -> bool:
        """Whether every value keeps its row."""
        return self.pooling == "none"

    def declared(self) -> dict[str, Any]:
        place = f"feature `{self.name}`"
        pooling = one_of(f"{place}: pooling", self.pooling or "sum", POOLINGS)
        if self.is_sequence != (self.length is not None):
            raise ExportError(f"{place}: pooling `{pooling}` with length {self.length}, expected a length with `none` alone")
        entry = super().declared() | {"table": self.table, "pooling": pooling}
        if self.is_sequence:
            entry |= {"length": self.length, "keep": one_of(f"{place}: keep", self.keep, KEPT)}
        if self.max_ids != MAX_IDS:
            entry["max_ids"] = self.max_ids
        if not self.weights and self.kind == "ids" and not self.is_sequence:
            entry["weights"] = False
        return entry | ({"column": self.column} if self.column else {})


@dataclass(frozen=True)
class Ids(LookedUp):
    """64-bit ids, each a row of the table."""

    kind: ClassVar[str] = "ids"


@dataclass(frozen=True)
class Category(LookedUp):
    """Texts or integers, which the table's vocabulary turns into rows."""

    kind: ClassVar[str] = "category"


@dataclass(frozen=True)
class Dense(Feature):
    """So many numbers, taken as they are."""

    name: str
    width: int = 1
    column: str | None = None

    kind: ClassVar[str] = "dense"

    def declared(self) -> dict[str, Any]:
        return super().declared() | {"width": self.width} | ({"column": self.column} if self.column else {})


@dataclass(frozen=True)
class Column:
    """An item column that is kept; with ``filter=False`` filters may not ask about it."""

    name: str
    filter: bool = True

    def declared(self) -> dict[str, Any]:
        """The column's entry of ``model.toml``."""
        return {"name": self.name, "filter": self.filter}


@dataclass(frozen=True)
class ItemVector:
    """A tensor that is kept for each item, for the OverArch: the item tower's output of this name, or a column of the item file.

    >>> ItemVector("parts", width=128, format="int8").declared()
    {'name': 'parts', 'width': 128, 'format': 'int8'}
    """

    name: str
    width: int
    column: str | None = None
    format: str = "f16"

    def declared(self) -> dict[str, Any]:
        """The tensor's entry of ``model.toml``."""
        one_of(f"item vector `{self.name}`: format", self.format, FORMATS)
        column = {"column": self.column} if self.column else {}
        return {"name": self.name, "width": self.width} | column | {"format": self.format}


@dataclass(frozen=True)
class Query:
    """One of several queries of a user: ``query`` is then ``[Q, Tq, D]``, and this is a row of its axis Tq."""

    name: str
    candidates: int | None = None
    weight: float = 1.0

    def declared(self) -> dict[str, Any]:
        """The query's entry of ``model.toml``."""
        candidates = {} if self.candidates is None else {"candidates": self.candidates}
        return {"name": self.name} | candidates | ({} if self.weight == 1 else {"weight": float(self.weight)})


def is_missing(value: Any) -> bool:
    """Whether a value says that there is none: None, or a NaN as data frames have it.

    >>> [is_missing(value) for value in (None, float("nan"), np.float32("nan"), 0, "", [])]
    [True, True, True, False, False, False]
    """
    return value is None or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))


def kept(values: Sequence[Any]) -> list[Any]:
    """An item's values as a column keeps them: each once, numbers by size and texts by their bytes.

    >>> kept(["vcs", "éditeurs", "devel", "vcs"]), kept([10, 9, 10])
    (['devel', 'vcs', 'éditeurs'], [9, 10])
    >>> kept(("b", "a", "b")), kept(np.array([2, 1, 2]))
    (['a', 'b'], [1, 2])
    """
    values = values.tolist() if isinstance(values, np.ndarray) else values
    return sorted(set(values), key=lambda value: value.encode() if isinstance(value, str) else value)


def listed(feature: Feature, row: Mapping[str, Any]) -> list[Any]:
    """The values that a request or an item brings for a feature, as a list; empty where it brings none.

    >>> listed(Category("section", table="sections"), {"section": "vcs"})
    ['vcs']
    >>> listed(Ids("installed", table="packages"), {})
    []
    """
    given = row.get(feature.source)
    if is_missing(given):
        return []
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, Mapping):
        return list(given["values"])
    return list(given) if isinstance(given, (list, tuple)) else [given]
