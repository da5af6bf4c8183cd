"""Inputs of graphs and stored columns of items, as ``model.toml`` declares them (``models/README.md``).

A feature has the name of the graph's input. Lookups happen outside the graph: for `Ids`, `Category` and `Text` the graph receives the
pooled embedding ``[Q, width of the table]``; with ``pooling="none"`` the graph receives the rows ``[Q, length, width]`` and ``NAME_mask`` ``[Q,
length]``, which is 1 at each value. For `Dense` the graph receives the numbers ``[Q, width]``. An OverArch receives the features of each
candidate, ``[Q, K0, ...]``; their values come from an item column: without duplicates, ascending.

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
    """Returns the value if it is one of the known ones, else raises an error."""
    if given not in known:
        raise ExportError(f"{what} `{given}`, expected one of: {', '.join(known)}")
    return given


class Feature:
    """One input of a graph; the kinds are `Ids`, `Category`, `Text` and `Dense`.

    ``column`` is the field of the request or the column of the item with the values, if that name differs from the
    feature's.
    """

    name: str
    column: str | None
    kind: ClassVar[str] = ""

    @property
    def source(self) -> str:
        """Field of the request or column of the item with the values."""
        return self.column or self.name

    def declared(self) -> dict[str, Any]:
        """Returns the entry of the feature in ``model.toml``."""
        return {"name": self.name, "kind": self.kind}


@dataclass(frozen=True)
class LookedUp(Feature):
    """A feature whose rows are looked up in a table: pooled, or as a sequence of ``length`` rows."""

    name: str
    table: str
    pooling: str | None = None
    """``sum``, ``mean`` or ``none``. The default is the table's pooling (of an ``nn.EmbeddingBag`` or a TorchRec collection),
    else ``sum``."""
    max_ids: int = MAX_IDS
    column: str | None = None
    length: int | None = None
    """Number of rows of a sequence; longer sequences are truncated."""
    keep: str = "last"
    """End of a longer sequence that is kept: the ``last`` or the ``first`` ``length`` values."""
    weights: bool = True
    """Whether weights of ids multiply their rows; False drops them, as an unweighted ``EmbeddingBagCollection`` does."""

    @property
    def is_sequence(self) -> bool:
        """Whether every value has its own row in the input."""
        return self.pooling == "none"

    def declared(self) -> dict[str, Any]:
        place = f"feature `{self.name}`"
        pooling = one_of(f"{place}: pooling", self.pooling or "sum", POOLINGS)
        is_cut = self.is_sequence or self.kind == "text"
        if is_cut != (self.length is not None):
            expected = "a length" if self.kind == "text" else "a length with `none` alone"
            raise ExportError(f"{place}: pooling `{pooling}` with length {self.length}, expected {expected}")
        entry = super().declared() | {"table": self.table, "pooling": pooling}
        if is_cut:
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
    """Texts or integers that the vocabulary of the table maps to rows."""

    kind: ClassVar[str] = "category"


@dataclass(frozen=True)
class Text(LookedUp):
    """A text, which the table's tokenizer turns into at most ``length`` tokens, special tokens included."""

    keep: str = "first"
    """End of a longer text that is kept: its ``first`` or ``last`` tokens."""

    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Dense(Feature):
    """``width`` numbers, used without a lookup."""

    name: str
    width: int = 1
    column: str | None = None

    kind: ClassVar[str] = "dense"

    def declared(self) -> dict[str, Any]:
        return super().declared() | {"width": self.width} | ({"column": self.column} if self.column else {})


@dataclass(frozen=True)
class Column:
    """A stored item column; with ``filter=False`` filters cannot use the column."""

    name: str
    filter: bool = True

    def declared(self) -> dict[str, Any]:
        """Returns the entry of the column in ``model.toml``."""
        return {"name": self.name, "filter": self.filter}


@dataclass(frozen=True)
class ItemVector:
    """A tensor that is stored per item for the OverArch: an output of the item tower with this name, or a column of the item
    file.
    

    >>> ItemVector("parts", width=128, format="int8").declared()
    {'name': 'parts', 'width': 128, 'format': 'int8'}
    """

    name: str
    width: int
    column: str | None = None
    format: str = "f16"

    def declared(self) -> dict[str, Any]:
        """Returns the entry of the tensor in ``model.toml``."""
        one_of(f"item vector `{self.name}`: format", self.format, FORMATS)
        column = {"column": self.column} if self.column else {}
        return {"name": self.name, "width": self.width} | column | {"format": self.format}


@dataclass(frozen=True)
class Query:
    """One of several queries of a user: a row of axis Tq, if ``query`` is ``[Q, Tq, D]``."""

    name: str
    candidates: int | None = None
    weight: float = 1.0

    def declared(self) -> dict[str, Any]:
        """Returns the entry of the query in ``model.toml``."""
        candidates = {} if self.candidates is None else {"candidates": self.candidates}
        return {"name": self.name} | candidates | ({} if self.weight == 1 else {"weight": float(self.weight)})


def is_missing(value: Any) -> bool:
    """Returns whether a value is missing: None, or NaN as in data frames.

    >>> [is_missing(value) for value in (None, float("nan"), np.float32("nan"), 0, "", [])]
    [True, True, True, False, False, False]
    """
    return value is None or (isinstance(value, (float, np.floating)) and bool(np.isnan(value)))


def kept(values: Sequence[Any]) -> list[Any]:
    """Returns the values of an item as a column stores them: without duplicates, numbers in ascending order and texts in the
    order of their bytes.
    

    >>> kept(["vcs", "éditeurs", "devel", "vcs"]), kept([10, 9, 10])
    (['devel', 'vcs', 'éditeurs'], [9, 10])
    >>> kept(("b", "a", "b")), kept(np.array([2, 1, 2]))
    (['a', 'b'], [1, 2])
    """
    values = values.tolist() if isinstance(values, np.ndarray) else values
    return sorted(set(values), key=lambda value: value.encode() if isinstance(value, str) else value)


def listed(feature: Feature, row: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a feature in a request or an item as a list; empty if the feature has no value.

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
