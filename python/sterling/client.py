"""A small client: retrieve, rank and embed with NumPy in and out, trying again when the server says so. Needs httpx."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import RequestError, SterlingError

RETRIED = (503,)
"""Statuses after which the same request may succeed: refused before anything was done."""


@dataclass(frozen=True)
class Ranked:
    """Items, best first: ``ids`` i64 ``[K]``, ``scores`` and ``similarities`` f32 ``[K]``, ``tasks`` by name ``[K]``, ``columns`` by name.

    ``model``, ``version`` and ``digest`` say which version answered.
    """

    ids: np.ndarray
    scores: np.ndarray
    similarities: np.ndarray
    tasks: dict[str, np.ndarray]
    columns: dict[str, list[Any]]
    model: str
    version: int
    digest: str

    def __len__(self) -> int:
        return len(self.ids)


class Client:
    """Calls of one server; it keeps its connections until the ``with`` block ends, or `close`.

    A request that the server refuses for want of time (503) is sent again after the seconds that ``Retry-After`` tells, up to ``retries`` times
    and only while ``patience`` seconds have not passed.
    """

    def __init__(self, url: str, *, timeout: float = 10, retries: int = 3, patience: float = 30):
        try:
            import httpx
        except ImportError as e:
            raise SterlingError(f"httpx is needed for the client: pip install 'sterling[client]' ({e})") from e
        self._http = httpx.Client(base_url=url, timeout=timeout)
        self.retries, self.patience = retries, patience

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def retrieve(
        self,
        model: str,
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        k: int = 20,
        **fields: Any,
    ) -> Ranked:
        """The best ``k`` items for a user's features or a query vector; ``fields`` are those of ``docs/API.md``: ``filter``, ``exclude``,
        ``columns``, ``candidates``, ``constants``, ``timeout_ms`` and others."""
        return _ranked(self._call(f"{model}:retrieve", _user(features, vector) | {"k": k} | fields))

    def rank(
        self,
        model: str,
        items: np.ndarray | Sequence[int],
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        **fields: Any,
    ) -> Ranked:
        """The scores of items that the caller names."""
        return _ranked(self._call(f"{model}:rank", _user(features, vector) | {"items": items} | fields))

    def embed(self, model: str, features: Mapping[str, Any]) -> np.ndarray:
        """The query embedding of features, f32 ``[D]``, or ``[Tq × D]`` of a model with several queries."""
        return np.asarray(self._call(f"{model}:embed", {"features": features})["embedding"], np.float32)

    def _call(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        end = time.monotonic() + self.patience
        for left in range(self.retries, -1, -1):
            answer = self._http.post(f"/v1/models/{call}", json=_plain(body))
            if answer.status_code == 200:
                return answer.json()
            problem = _problem(answer)
            pause = 1.0 if problem.retry_after is None else problem.retry_after
            if answer.status_code not in RETRIED or not left or time.monotonic() + pause > end:
                raise problem
            time.sleep(pause)
        raise AssertionError("the last try has returned or raised")


def _user(features: Mapping[str, Any] | None, vector: Any) -> dict[str, Any]:
    if (features is None) == (vector is None):
        raise ValueError("expected features or a vector, and not both")
    return {"features": features} if vector is None else {"vector": vector}


def _plain(value: Any) -> Any:
    """Arrays and NumPy's numbers as JSON has them.

    >>> _plain({"ids": np.array([1, 2]), "weights": (np.float32(0.5),)})
    {'ids': [1, 2], 'weights': [0.5]}
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def _problem(answer: Any) -> RequestError:
    try:
        problem = answer.json()
    except ValueError:
        problem = None
    after = answer.headers.get("retry-after", "")
    told = problem if isinstance(problem, dict) else {"detail": answer.text}
    return RequestError(answer.status_code, told, float(after) if after.isdigit() else None)


def _ranked(answer: Mapping[str, Any]) -> Ranked:
    items = answer["items"]
    names = lambda key: list(items[0].get(key) or {}) if items else []  # noqa: E731
    return Ranked(
        ids=np.array([item["id"] for item in items], np.int64),
        scores=np.array([item["score"] for item in items], np.float32),
        similarities=np.array([item["similarity"] for item in items], np.float32),
        tasks={task: np.array([item["tasks"][task] for item in items], np.float32) for task in names("tasks")},
        columns={name: [item["columns"].get(name) for item in items] for name in names("columns")},
        model=answer["model"], version=answer["version"], digest=answer["digest"],
    )  # fmt: skip
