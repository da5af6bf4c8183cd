"""Answers of a server, decoded from JSON or Arrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import RequestError


@dataclass(frozen=True)
class Ranked:
    """Items, best first: ``ids`` i64 ``[K]``, ``scores`` and ``similarities`` f32 ``[K]``, ``tasks`` by name ``[K]``, ``columns``
    by name.

    ``model``, ``version`` and ``digest`` name the version that answered, ``position`` the last update that it had applied.
    ``cursor`` is the start of the next page, if there is one. ``explain`` is the report of the steps, if requested. ``unknown`` holds the ids in a
    ranking that the model does not have.
    """

    ids: np.ndarray
    scores: np.ndarray
    similarities: np.ndarray
    tasks: dict[str, np.ndarray]
    columns: dict[str, list[Any]]
    model: str
    version: int
    digest: str
    position: int = 0
    cursor: str | None = None
    explain: dict[str, Any] | None = None
    unknown: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def to_pandas(self) -> Any:
        """Returns a data frame of the items: ``id``, ``score``, ``similarity``, ``tasks.NAME`` and ``columns.NAME``. Needs
        pandas."""
        import pandas

        data: dict[str, Any] = {"id": self.ids, "score": self.scores, "similarity": self.similarities}
        data |= {f"tasks.{name}": scores for name, scores in self.tasks.items()}
        return pandas.DataFrame(data | {f"columns.{name}": values for name, values in self.columns.items()})


@dataclass(frozen=True)
class Upserted:
    """Result of an upsert: the number of ``accepted`` items, and the rejected ones in ``refused`` (``place``, ``id``, ``field``
    and ``reason`` of each).

    Answers at ``position`` or later include the items. A router over several shards returns the positions of the shards in ``positions``.
    """

    accepted: int
    refused: list[dict[str, Any]]
    position: int
    positions: list[int] = field(default_factory=list)


def ranked(answer: Mapping[str, Any], shared: Mapping[str, Any] | None = None) -> Ranked:
    """Returns the items of a JSON answer. For one answer of a list, `shared` holds the fields that all answers of the list share."""
    items = answer["items"]
    names = lambda key: list(items[0].get(key) or {}) if items else []  # noqa: E731
    return Ranked(
        ids=np.array([item["id"] for item in items], np.int64),
        scores=np.array([item["score"] for item in items], np.float32),
        similarities=np.array([item["similarity"] for item in items], np.float32),
        tasks={task: np.array([item["tasks"][task] for item in items], np.float32) for task in names("tasks")},
        columns={name: [item["columns"].get(name) for item in items] for name in names("columns")},
        **_metadata(answer if shared is None else _of_one(shared, answer)),
    )


def many(answer: Mapping[str, Any]) -> list[Ranked | RequestError]:
    """Returns the answers to a list of requests in JSON; the entry of a failed request is its error."""
    return [_problem(one) or ranked(one, answer) for one in answer["results"]]


def ranked_of_arrow(content: bytes) -> Ranked:
    """Returns the items of an Arrow answer."""
    shared, table = _read(content)
    return _table(table, shared)


def many_of_arrow(content: bytes) -> list[Ranked | RequestError]:
    """Returns the answers to a list of requests as Arrow."""
    shared, table = _read(content)
    found: list[Ranked | RequestError] = []
    first = 0
    for one in shared["results"]:
        rows = one.get("rows", 0)
        found.append(_problem(one) or _table(table.slice(first, rows), _of_one(shared, one)))
        first += rows
    return found


def _problem(result: Mapping[str, Any]) -> RequestError | None:
    problem = result.get("problem")
    return None if problem is None else RequestError(problem["status"], dict(problem))


def _of_one(shared: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the fields that all answers share with the fields of one answer."""
    return {**shared, "cursor": None} | {name: one.get(name) for name in ("explain", "unknown")}


def _metadata(answer: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: answer[name] for name in ("model", "version", "digest", "position")}
    return found | {"cursor": answer.get("cursor"), "explain": answer.get("explain"), "unknown": answer.get("unknown") or []}


def _read(content: bytes) -> tuple[dict[str, Any], Any]:
    from pyarrow import ipc

    with ipc.open_stream(content) as stream:
        return json.loads(stream.schema.metadata[b"sterling"]), stream.read_all()


def _table(table: Any, shared: Mapping[str, Any]) -> Ranked:
    group = lambda name: {key.removeprefix(name): table[key] for key in table.column_names if key.startswith(name)}  # noqa: E731
    return Ranked(
        ids=table["id"].to_numpy(),
        scores=table["score"].to_numpy(),
        similarities=table["similarity"].to_numpy(),
        tasks={name: scores.to_numpy() for name, scores in group("tasks.").items()},
        columns={name: values.to_pylist() for name, values in group("columns.").items()},
        **_metadata(shared),
    )
