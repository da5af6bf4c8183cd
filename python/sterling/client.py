"""A small client: retrieve, rank and embed with NumPy in and out, trying again when the server says so. Needs httpx, and pyarrow for answers as Arrow."""

from __future__ import annotations

import base64
import gzip
import json
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from .errors import RequestError, SterlingError

RETRIED = (503,)
"""Statuses after which the same request may succeed: refused before anything was done."""

ARROW = "application/vnd.apache.arrow.stream"
"""The media type of answers that come as Arrow."""

COMPRESSED = 32 << 10
"""Bytes from which bodies are compressed, where that is asked for: as the server does with answers."""


@dataclass(frozen=True)
class Ranked:
    """Items, best first: ``ids`` i64 ``[K]``, ``scores`` and ``similarities`` f32 ``[K]``, ``tasks`` by name ``[K]``, ``columns`` by name.

    ``model``, ``version`` and ``digest`` say which version answered, ``position`` which updates it saw; ``cursor`` where the next page begins, where
    there is one.
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

    def __len__(self) -> int:
        return len(self.ids)

    def to_pandas(self) -> Any:
        """A data frame of the items: ``id``, ``score``, ``similarity``, ``tasks.NAME`` and ``columns.NAME``. Needs pandas."""
        import pandas

        data: dict[str, Any] = {"id": self.ids, "score": self.scores, "similarity": self.similarities}
        data |= {f"tasks.{name}": scores for name, scores in self.tasks.items()}
        return pandas.DataFrame(data | {f"columns.{name}": values for name, values in self.columns.items()})


class Client:
    """Calls of one server; it keeps its connections until the ``with`` block ends, or `close`.

    A request that the server refuses for want of time (503) is sent again after the seconds that ``Retry-After`` tells, up to ``retries`` times
    and only while ``patience`` seconds have not passed.

    ``api_key`` is a key of the server's. Of a server with TLS, ``ca`` is a file of the authorities that are trusted (the system's without it), ``certificate``
    the files of a certificate and its key, where the server wants one. With ``arrow`` retrievals and rankings come as Arrow, which is worth it from some
    hundred results on (needs pyarrow). With ``compression`` large bodies and answers are compressed: worth it where the network is slow.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10,
        retries: int = 3,
        patience: float = 30,
        api_key: str | None = None,
        ca: str | PathLike[str] | None = None,
        certificate: tuple[str | PathLike[str], str | PathLike[str]] | None = None,
        arrow: bool = False,
        compression: bool = False,
    ):
        try:
            import httpx
        except ImportError as e:
            raise SterlingError(f"httpx is needed for the client: pip install 'sterling[client]' ({e})") from e
        if arrow:
            try:
                import pyarrow.ipc  # noqa: F401
            except ImportError as e:
                raise SterlingError(f"pyarrow is needed for answers as Arrow: pip install 'sterling[arrow]' ({e})") from e
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        headers = {"accept-encoding": "gzip" if compression else "identity", "content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(base_url=url, timeout=timeout, verify=context, headers=headers)
        self.retries, self.patience, self._arrow, self._compression = retries, patience, arrow, compression

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
        sticky: str | None = None,
        **fields: Any,
    ) -> Ranked:
        """The best ``k`` items for a user's features or a query vector; ``fields`` are those of ``docs/API.md``: ``filter``, ``exclude``,
        ``columns``, ``candidates``, ``constants``, ``timeout_ms`` and others. Beside a canary requests of one ``sticky`` key are answered by one version."""
        return self._items(f"{model}:retrieve", _user(features, vector) | {"k": k} | fields, sticky)

    def pages(
        self,
        model: str,
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        k: int = 20,
        **fields: Any,
    ) -> Iterator[Ranked]:
        """The same, ``k`` items at a time: slices of one ranking, of as many items in all as it has candidates, whatever is updated meanwhile."""
        body = _user(features, vector) | {"k": k} | fields
        cursor: str | None = ""
        while cursor is not None:
            page = self._items(f"{model}:retrieve", body | {"cursor": cursor})
            yield page
            cursor = page.cursor

    def rank(
        self,
        model: str,
        items: np.ndarray | Sequence[int],
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        sticky: str | None = None,
        **fields: Any,
    ) -> Ranked:
        """The scores of items that the caller names."""
        return self._items(f"{model}:rank", _user(features, vector) | {"items": items} | fields, sticky)

    def embed(self, model: str, features: Mapping[str, Any], *, sticky: str | None = None) -> np.ndarray:
        """The query embedding of features, f32 ``[D]``, or ``[Tq × D]`` of a model with several queries."""
        answer = self._call("POST", f"{model}:embed", {"features": features}, _sticking(sticky))
        return np.asarray(answer.json()["embedding"], np.float32)

    def traffic(self, model: str) -> dict[str, Any]:
        """The canary and the shadow of a model, and what this server has seen of them; ``docs/API.md`` has the fields."""
        return self._call("GET", f"{model}/traffic").json()

    def set_traffic(
        self,
        model: str,
        *,
        canary: Mapping[str, Any] | None = None,
        shadow: Mapping[str, Any] | None = None,
        revision: int | None = None,
    ) -> dict[str, Any]:
        """Says at all servers of the store which version answers a share of the requests (``canary={"version": 8, "share": 0.05}``) and which one is asked
        some as well (``shadow={"version": 8, "share": 0.1}``); what is left out is none. With the ``revision`` that `traffic` told it is refused
        (409) where somebody else has changed it since."""
        body = {"canary": canary, "shadow": shadow, "revision": revision}
        return self._call("PUT", f"{model}/traffic", {key: value for key, value in body.items() if value is not None}).json()

    def _items(self, call: str, body: Mapping[str, Any], sticky: str | None = None) -> Ranked:
        headers = _sticking(sticky)
        if not self._arrow:
            return _ranked(self._call("POST", call, body, headers).json())
        answer = self._call("POST", call, body, headers | {"accept": ARROW})
        # What stands between may answer in its own way.
        return _of_arrow(answer.content) if answer.headers.get("content-type") == ARROW else _ranked(answer.json())

    def _call(self, method: str, call: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        content = b"" if body is None else json.dumps(_plain(body), allow_nan=False).encode()
        headers = dict(headers or {})
        if self._compression and len(content) >= COMPRESSED:
            content, headers["content-encoding"] = gzip.compress(content, 1), "gzip"
        end = time.monotonic() + self.patience
        for left in range(self.retries, -1, -1):
            answer = self._http.request(method, f"/v1/models/{call}", content=content, headers=headers)
            if answer.status_code == 200:
                return answer
            problem = _problem(answer)
            pause = 1.0 if problem.retry_after is None else problem.retry_after
            if answer.status_code not in RETRIED or not left or time.monotonic() + pause > end:
                raise problem
            time.sleep(pause)
        raise AssertionError("the last try has returned or raised")


def _user(features: Mapping[str, Any] | None, vector: Any) -> dict[str, Any]:
    if (features is None) == (vector is None):
        raise ValueError("expected features or a vector, and not both")
    if vector is not None:
        return {"vector": _packed(np.asarray(vector))}
    is_numbers = lambda x: isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating)  # noqa: E731
    return {"features": {name: {"base64": _packed(x)} if is_numbers(x) else x for name, x in features.items()}}


def _sticking(key: str | None) -> dict[str, str]:
    return {} if key is None else {"x-sterling-sticky": key}


def _packed(numbers: np.ndarray) -> str:
    """Numbers as the server takes them: little-endian f32 in base64.

    >>> _packed(np.array([1.0, -2.5]))
    'AACAPwAAIMA='
    """
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


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
        **_told(answer),
    )


def _told(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: answer[name] for name in ("model", "version", "digest", "position")} | {"cursor": answer.get("cursor")}


def _of_arrow(content: bytes) -> Ranked:
    from pyarrow import ipc

    with ipc.open_stream(content) as stream:
        told, table = json.loads(stream.schema.metadata[b"sterling"]), stream.read_all()
    group = lambda name: {key.removeprefix(name): table[key] for key in table.column_names if key.startswith(name)}  # noqa: E731
    return Ranked(
        ids=table["id"].to_numpy(),
        scores=table["score"].to_numpy(),
        similarities=table["similarity"].to_numpy(),
        tasks={name: scores.to_numpy() for name, scores in group("tasks.").items()},
        columns={name: values.to_pylist() for name, values in group("columns.").items()},
        **_told(told),
    )
