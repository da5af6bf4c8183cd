"""A small client: retrieve, rank and embed with NumPy arrays, with retries when the server requests them. Needs httpx, and
pyarrow for answers as Arrow."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from os import PathLike
from typing import Any

import numpy as np

from .answers import Ranked, Upserted, many, many_of_arrow, ranked, ranked_of_arrow
from .errors import ConnectionFailed, RequestError, SterlingError
from .streams import is_there, stream

RETRIED = (429, 503)
"""Statuses after which the same request may succeed. All calls may be repeated: those that write replace values."""

ARROW = "application/vnd.apache.arrow.stream"
"""Media type of Arrow bodies and answers."""

REQUESTS_MAX = 1024
"""Maximal number of requests in one body."""

ITEMS_MAX = 10_000
"""Maximal number of items in one body."""

BODY_BYTES = 16 << 20
"""Maximal number of bytes of vectors in one body."""

COMPRESSED = 32 << 10
"""Size in bytes from which bodies are compressed if ``compression`` is set; the server uses the same size for answers."""


_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _process() -> tuple[int, int]:
    """Returns an identity of this process, with the number of forks, because the process id of an ancestor that has ended may
    be reused."""
    return os.getpid(), _forks


class Client:
    """Client of one server. The client keeps its connections until the ``with`` block ends, or until `close`.

    A request that exceeds the rate of its key (429), or that an overloaded server rejects (503), is sent again after the seconds
    of ``Retry-After`` (1 without it): up to ``retries`` times, and only within ``patience`` seconds and the time of the call,
    which is its ``timeout_ms`` if it has one, otherwise ``timeout``.

    ``api_key`` is a key of the server. For TLS, ``ca`` is a file of trusted authorities (default: those of the system), and
    ``certificate`` the files of a client certificate and its key, if the server requires one. With ``arrow``, retrievals and
    rankings are sent as Arrow, which pays off from some hundred results on (needs pyarrow). With ``compression``, large bodies
    and answers are compressed, which pays off on slow networks.

    A client may be used before and after a fork: every process has its own connections. A call, with its retries, ends after
    ``timeout`` seconds; a call with a larger ``timeout_ms`` has that time plus one second.
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
            raise SterlingError(f"httpx is needed for the client: pip install httpx ({e})") from e
        if arrow and not is_there():
            raise SterlingError("pyarrow is needed for answers as Arrow: pip install pyarrow")
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"url: got {url!r}, expected one that begins with http:// or https://")
        if not timeout > 0:
            raise ValueError(f"timeout: got {timeout!r}, expected seconds above 0")
        if retries < 0:
            raise ValueError(f"retries: got {retries!r}, expected 0 or more")
        context = ssl.create_default_context(cafile=ca)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        headers = {"accept-encoding": "gzip" if compression else "identity", "content-type": "application/json"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {_visible('api_key', api_key)}"
        # Requests to the loopback interface of this machine must not go through a proxy.
        direct = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
        self._open = lambda: httpx.Client(base_url=str(url), timeout=timeout, verify=context, headers=headers, mounts=direct)
        self._url, self._failed = str(url).rstrip("/"), httpx.TransportError
        #: Connections by process: connections of another process are neither used nor closed.
        self._pools = {_process(): self._open()}
        self._is_closed = False
        self.timeout, self.retries, self.patience, self._arrow, self._compression = timeout, retries, patience, arrow, compression

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections of this process."""
        self._is_closed = True
        if pool := self._pools.get(_process()):
            pool.close()

    @property
    def _http(self) -> Any:
        """Returns the connections of this process."""
        pool = self._pools.get(_process())
        if pool is None:
            if self._is_closed:
                raise SterlingError("the client is closed")
            pool = self._pools.setdefault(_process(), self._open())
        return pool

    def retrieve(
        self,
        model: str,
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        k: int = 20,
        sticky: str | None = None,
        min_position: int | Sequence[int] | None = None,
        min_coverage: float | None = None,
        **fields: Any,
    ) -> Ranked:
        """Returns the best ``k`` items for the features of a user or for a query vector. ``fields`` are listed in
        ``docs/reference/http.md``: ``filter``, ``exclude``, ``columns``, ``candidates``, ``constants``, ``timeout_ms`` and
        others. While a canary is active, requests with the same ``sticky`` key are answered by the same version. Waits until
        the updates up to ``min_position`` are visible: the ``position`` of `upsert`, or its ``positions`` through a router,
        which accepts answers that cover at least the share ``min_coverage`` of the items."""
        return self._items(f"{_named(model)}:retrieve{_reading(min_position, min_coverage)}", _user(features, vector) | {"k": k} | fields, sticky)

    def retrieve_many(
        self,
        model: str,
        *,
        vectors: np.ndarray | Sequence[Sequence[float]] | None = None,
        features: Mapping[str, Sequence[Any]] | None = None,
        filters: Sequence[str | None] | None = None,
        excludes: Sequence[Sequence[int] | None] | None = None,
        k: int = 20,
        sticky: str | None = None,
        min_position: int | Sequence[int] | None = None,
        min_coverage: float | None = None,
        progress: Callable[[int, int], None] | None = None,
        **fields: Any,
    ) -> list[Ranked | RequestError]:
        """Returns the best ``k`` items for each of several users: ``vectors`` ``[B, D]``, or ``features`` with the values of
        the B users per feature. ``filters`` and ``excludes`` have one entry per user. As in `retrieve`, ``fields``, ``min_position`` and
        ``min_coverage`` apply to all users. The answers have the order of the users; the entry of an invalid request is its error.
        ``progress`` is called with the number of answered users and the number of all users."""
        columns = _users(features, vectors) | {name: list(rows) for name, rows in (("filter", filters), ("exclude", excludes)) if rows is not None}
        count, shared, headers = _count(columns), {"k": k} | fields, _sticking(sticky)
        if self._arrow:
            headers["accept"] = ARROW
        call = f"{_named(model)}:retrieve{_reading(min_position, min_coverage)}"
        found: list[Ranked | RequestError] = []
        for part in _parts(columns, count, REQUESTS_MAX):
            body = lambda part=part: {"requests": [shared | _request(row) for row in _rows(part)]}  # noqa: E731
            answer = self._table("POST", call, (part, shared), body, headers)
            found += many_of_arrow(answer.content) if answer.headers.get("content-type") == ARROW else many(answer.json())
            if progress is not None:
                progress(len(found), count)
        return found

    def upsert(
        self,
        model: str,
        ids: np.ndarray | Sequence[int],
        *,
        embeddings: np.ndarray | None = None,
        attributes: Mapping[str, Sequence[Any]] | None = None,
        changes: Mapping[str, Sequence[Any]] | None = None,
        key: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Upserted:
        """Upserts items: ``embeddings`` ``[N, D]`` and all ``attributes``, by name, with one value (or list) per item. With
        ``changes`` instead, updates these attributes and leaves all other attributes unchanged. ``None`` and NaN mean no value. A
        repeated call with the same ``key`` is applied once."""
        if changes is not None and (attributes is not None or embeddings is not None):
            raise ValueError("expected changes, or embeddings and attributes")
        columns: dict[str, Any] = {"id": _ids(ids)}
        if embeddings is not None:
            columns["embedding"] = _real("embeddings", embeddings).astype(np.float32, copy=False)
        kind, given = ("attributes", attributes or {}) if changes is None else ("set", changes)
        columns |= {f"{kind}.{name}": values for name, values in given.items()}
        count, made = _count(columns), Upserted(0, [], 0)
        first = 0
        for number, part in enumerate(_parts(columns, count, ITEMS_MAX)):
            headers = {} if key is None else {"idempotency-key": f"{key}-{number}" if count > len(part["id"]) else key}
            body = lambda part=part: {"items": [_item(row, kind) for row in _rows(part)]}  # noqa: E731
            told = self._table("POST", f"{_named(model)}/items:upsert", (part, None), body, headers).json()
            refused = made.refused + [item | {"place": item["place"] + first} for item in told["refused"]]
            # Each shard of a router has its own position; all positions together make all items visible.
            positions = [max(both) for both in itertools.zip_longest(made.positions, told.get("positions", []), fillvalue=0)]
            # The single position is the lowest of the shards' positions, as in the answer of the router.
            position = min((reached for reached in positions if reached), default=max(made.position, told["position"]))
            made = Upserted(made.accepted + told["accepted"], refused, position, positions)
            first += len(part["id"])
            if progress is not None:
                progress(first, count)
        return made

    def pages(
        self,
        model: str,
        *,
        features: Mapping[str, Any] | None = None,
        vector: np.ndarray | Sequence[float] | None = None,
        k: int = 20,
        min_position: int | Sequence[int] | None = None,
        **fields: Any,
    ) -> Iterator[Ranked]:
        """Yields the results of `retrieve` in pages of ``k`` items. All pages are slices of one ranking of the candidates,
        regardless of updates in the meantime; the request of the first page waits for ``min_position``."""
        body = _user(features, vector) | {"k": k} | fields
        cursor: str | None = ""
        while cursor is not None:
            reading = _reading(None if cursor else min_position, None)
            page = self._items(f"{_named(model)}:retrieve{reading}", body | {"cursor": cursor})
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
        min_position: int | Sequence[int] | None = None,
        min_coverage: float | None = None,
        **fields: Any,
    ) -> Ranked:
        """Returns the scores of items that the caller names; the other arguments are as in `retrieve`."""
        return self._items(f"{_named(model)}:rank{_reading(min_position, min_coverage)}", _user(features, vector) | {"items": items} | fields, sticky)

    def embed(self, model: str, features: Mapping[str, Any], *, sticky: str | None = None) -> np.ndarray:
        """Returns the query embedding of features, f32 ``[D]``, or ``[Tq × D]`` for a model with several queries."""
        answer = self._call("POST", f"{_named(model)}:embed", {"features": features}, _sticking(sticky))
        return np.asarray(answer.json()["embedding"], np.float32)

    def traffic(self, model: str) -> dict[str, Any]:
        """Returns the canary and the shadow of a model with the statistics of this server; the fields are in
        ``docs/reference/http.md``."""
        return self._call("GET", f"{_named(model)}/traffic").json()

    def set_traffic(
        self,
        model: str,
        *,
        canary: Mapping[str, Any] | None = None,
        shadow: Mapping[str, Any] | None = None,
        revision: int | None = None,
    ) -> dict[str, Any]:
        """Sets, for all servers of the store, the version that answers a share of the requests (``canary={"version": 8,
        "share": 0.05}``) and the version that receives copies of requests (``shadow={"version": 8, "share": 0.1}``); an argument
        that is left out removes the canary or shadow. With the ``revision`` that `traffic` returned, the call fails (409) if the state has
        changed since."""
        body = {"canary": canary, "shadow": shadow, "revision": revision}
        return self._call("PUT", f"{_named(model)}/traffic", {key: value for key, value in body.items() if value is not None}).json()

    def _items(self, call: str, body: Mapping[str, Any], sticky: str | None = None) -> Ranked:
        headers = _sticking(sticky)
        if not self._arrow:
            return ranked(self._call("POST", call, body, headers).json())
        answer = self._call("POST", call, body, headers | {"accept": ARROW})
        # A proxy between client and server may answer in another format.
        return ranked_of_arrow(answer.content) if answer.headers.get("content-type") == ARROW else ranked(answer.json())

    def _table(
        self, method: str, call: str, table: tuple[Mapping[str, Any], Mapping[str, Any] | None], body: Callable[[], Any], headers: Mapping[str, str]
    ) -> Any:
        """Sends columns with the fields that all rows share, as Arrow or, without pyarrow, as JSON."""
        columns, shared = table
        if not is_there():
            content = json.dumps(_plain(body()), allow_nan=False).encode()
            return self._send(method, call, content, headers, (shared or {}).get("timeout_ms"))
        content = stream(columns, None if shared is None else _plain(shared))
        return self._send(method, call, content, {**headers, "content-type": ARROW}, (shared or {}).get("timeout_ms"))

    def _call(self, method: str, call: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None) -> Any:
        content = b"" if body is None else json.dumps(_plain(body), allow_nan=False).encode()
        return self._send(method, call, content, headers or {}, (body or {}).get("timeout_ms"))

    def _send(self, method: str, call: str, content: bytes, headers: Mapping[str, str], timeout_ms: Any = None) -> Any:
        headers = dict(headers)
        own = timeout_ms / 1000 if isinstance(timeout_ms, Real) else None
        timeout = self.timeout if own is None else max(self.timeout, own + 1)
        if self._compression and len(content) >= COMPRESSED:
            content, headers["content-encoding"] = gzip.compress(content, 1), "gzip"
        start, remaining = time.monotonic(), timeout
        last_retry = start + min(self.patience, timeout if own is None else own)
        for left in range(self.retries, -1, -1):
            try:
                answer = self._http.request(method, f"/v1/models/{call}", content=content, headers=headers, timeout=remaining)
            except self._failed as e:
                raise ConnectionFailed(f"{method} {self._url}/v1/models/{call}: {type(e).__name__}: {e}") from e
            if answer.status_code == 200:
                return answer
            problem = _problem(answer)
            pause = 1.0 if problem.retry_after is None else problem.retry_after
            if answer.status_code not in RETRIED or not left or time.monotonic() + pause >= last_retry:
                raise problem
            time.sleep(pause)
            remaining = max(start + timeout - time.monotonic(), 0.001)
        raise AssertionError("the last try has returned or raised")


def _named(model: str) -> str:
    """Returns the URL path segment of a model, or of a version or label of a model.

    >>> _named("shop?/versions/3")
    'shop%3F/versions/3'
    """
    return urllib.parse.quote(model)


def _reading(min_position: int | Sequence[int] | None, min_coverage: float | None) -> str:
    """Returns the query of the URL of a call that reads items.

    >>> _reading([12, 0], 0.9)
    '?min_position=12,0&min_coverage=0.9'
    """
    positions = [min_position] if isinstance(min_position, int) else min_position
    given = {"min_position": None if positions is None else ",".join(map(str, positions)), "min_coverage": min_coverage}
    query = urllib.parse.urlencode({name: value for name, value in given.items() if value is not None}, safe=",")
    return f"?{query}" if query else ""


def _ids(ids: Any) -> np.ndarray:
    """Converts ids to 64-bit integers; other types raise an error and are not rounded.

    >>> _ids([1.5])
    Traceback (most recent call last):
    ValueError: ids: got float64 of 1 dimensions, expected a list of 64-bit integers
    """
    given = np.asarray(ids)
    is_whole = given.size == 0 or (np.issubdtype(given.dtype, np.integer) and int(given.max()) < 1 << 63)
    if given.ndim != 1 or not is_whole:
        raise ValueError(f"ids: got {given.dtype} of {given.ndim} dimensions, expected a list of 64-bit integers")
    return given.astype(np.int64)


def _real(name: str, numbers: Any) -> np.ndarray:
    """Converts numbers to an array. Other types raise an error: NumPy would drop the imaginary part of complex numbers.

    >>> _real("vector", [1j])
    Traceback (most recent call last):
    ValueError: vector: got complex128, expected real numbers
    """
    given = np.asarray(numbers)
    if given.dtype.kind not in "biufO":
        raise ValueError(f"{name}: got {given.dtype}, expected real numbers")
    return given


def _user(features: Mapping[str, Any] | None, vector: Any) -> dict[str, Any]:
    if (features is None) == (vector is None):
        raise ValueError("expected either features or a vector")
    if vector is not None:
        numbers = _real("vector", vector)
        if numbers.ndim != 1:
            raise ValueError(f"vector: got shape {list(numbers.shape)}, expected [D], or the Tq x D numbers of several queries one after the other")
        return {"vector": _packed(numbers)}
    # An empty array has no useful type: NumPy makes floats of a history without ids.
    is_numbers = lambda x: isinstance(x, np.ndarray) and np.issubdtype(x.dtype, np.floating) and x.size > 0  # noqa: E731
    return {"features": {name: {"base64": _packed(x)} if is_numbers(x) else x for name, x in features.items()}}


def _users(features: Mapping[str, Sequence[Any]] | None, vectors: Any) -> dict[str, Any]:
    if (features is None) == (vectors is None):
        raise ValueError("expected either features or vectors")
    if vectors is None:
        return {f"features.{name}": _values(values) for name, values in (features if features is not None else {}).items()}
    matrix = _real("vectors", vectors).astype(np.float32, copy=False)
    if matrix.ndim != 2:
        raise ValueError(f"vectors: got {matrix.ndim} dimensions, expected [B, D]")
    return {"vector": matrix}


def _values(values: Any) -> Any:
    """Converts the values of a feature of several users. An empty array has no useful type, so it becomes an empty list.

    >>> _values([np.array([3, 4]), np.array([])])
    [array([3, 4]), []]
    """
    is_empty = lambda value: isinstance(value, np.ndarray) and value.size == 0  # noqa: E731
    are_rows = isinstance(values, (list, tuple)) or str(getattr(values, "dtype", "")) == "object"
    return [[] if is_empty(value) else value for value in values] if are_rows and any(map(is_empty, values)) else values


def _count(columns: Mapping[str, Any]) -> int:
    """Returns the number of rows of columns, which must all have the same length.

    >>> _count({"id": [1, 2], "embedding": np.zeros((2, 3))})
    2
    """
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"expected as many values in each column, got {counts}")
    return next(iter(counts.values()))


def _parts(columns: Mapping[str, Any], count: int, most: int) -> Iterator[dict[str, Any]]:
    """Yields columns in batches of at most ``most`` rows, fewer rows if matrices are wide."""
    width = sum(values[0].nbytes for values in columns.values() if isinstance(values, np.ndarray) and values.ndim == 2 and len(values))
    rows = max(1, min(most, BODY_BYTES // max(1, width)))
    for first in range(0, count, rows):
        yield {name: values[first : first + rows] for name, values in columns.items()}


def _rows(columns: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows of columns; missing values become None.

    >>> list(_rows({"id": np.array([3, 4]), "set.a": [0.5, float("nan")]}))
    [{'id': 3, 'set.a': 0.5}, {'id': 4, 'set.a': None}]
    """
    is_missing = lambda value: isinstance(value, float) and value != value  # noqa: E731
    plain = {name: list(values) for name, values in columns.items()}
    for row in range(_count(columns)):
        values = {name: _packed(rows[row]) if name in ("vector", "embedding") else _plain(rows[row]) for name, rows in plain.items()}
        yield {name: None if is_missing(value) else value for name, value in values.items()}


def _request(row: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in row.items() if value is not None}
    features = {name.removeprefix("features."): value for name, value in given.items() if name.startswith("features.")}
    rest = {name: value for name, value in given.items() if not name.startswith("features.")}
    return rest if "vector" in rest else rest | {"features": features}


def _item(row: Mapping[str, Any], kind: str) -> dict[str, Any]:
    given = {name.removeprefix(f"{kind}."): value for name, value in row.items() if name.startswith(f"{kind}.")}
    return {name: row[name] for name in ("id", "embedding") if name in row} | {kind: given}


def _sticking(key: str | None) -> dict[str, str]:
    return {} if key is None else {"x-sterling-sticky": _visible("sticky", key)}


def _visible(what: str, text: str) -> str:
    """Checks that a text can be sent in a header.

    >>> _visible("sticky", "é")
    Traceback (most recent call last):
    ValueError: sticky: got 'é', expected visible ASCII characters
    """
    if not (text.isascii() and text.isprintable()):
        raise ValueError(f"{what}: got {text!r}, expected visible ASCII characters")
    return text


def _packed(numbers: np.ndarray) -> str:
    """Encodes numbers in the format of the server: little-endian f32 in base64.

    >>> _packed(np.array([1.0, -2.5]))
    'AACAPwAAIMA='
    """
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()


def _plain(value: Any) -> Any:
    """Converts arrays, NumPy scalars, and pandas or Polars series to JSON values.

    >>> _plain({"ids": np.array([1, 2]), "weights": (np.float32(0.5),)})
    {'ids': [1, 2], 'weights': [0.5]}
    """
    for listed in ("tolist", "to_list"):
        if hasattr(value, listed):
            return getattr(value, listed)()
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
