"""Published versions as NumPy arrays (``docs/reference/formats.md``).

Arrays are read-only views of the memory-mapped files; opening a version only verifies the checksums, which reads every byte once.
NumPy has no bfloat16: such tensors are widened to float32, which is exact.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .errors import SnapshotError
from .weights import weights

FORMAT = 1
"""Highest format number that this package reads."""

BLOCK = 16
_HEADER_MAX = 100_000_000
_TYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8",
    "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
# Bits per code, by the name of a row format.
_CODES = {"int8": 8, "int4": 4, "int2": 2}


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the tensors of a ``.safetensors`` file by name, memory-mapped and read-only.

    Raises `SnapshotError` if the file is not a safetensors file, or is shorter than its header says.
    """
    path = pathlib.Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if size < 8 or start > size or start > _HEADER_MAX:
                raise SnapshotError(f"{path}: not a safetensors file: a header of {start - 8} bytes in a file of {size}")
            header = json.loads(file.read(start - 8))
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise SnapshotError(f"{path}: {e.strerror}") from e
    except ValueError as e:
        if isinstance(e, SnapshotError):
            raise
        raise SnapshotError(f"{path}: not a safetensors file: {e}") from e
    if not isinstance(header, dict):
        raise SnapshotError(f"{path}: not a safetensors file: its header is not an object")
    return {name: _tensor(path, name, entry, data, start) for name, entry in header.items() if name != "__metadata__"}


def _tensor(path: pathlib.Path, name: str, entry: Any, data: mmap.mmap, start: int) -> np.ndarray:
    try:
        dtype, shape, (begin, end) = _TYPES[entry["dtype"]], list(entry["shape"]), entry["data_offsets"]
        count = math.prod(shape)
        is_whole = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and begin <= end <= len(data) - start
        if not is_whole or count * np.dtype(dtype).itemsize != end - begin:
            raise ValueError(f"shape {shape} of {entry['dtype']} at bytes {begin} to {end} of {len(data) - start}")
    except (KeyError, TypeError, ValueError) as e:
        raise SnapshotError(f"{path}: tensor `{name}` is invalid: {e!r}") from e
    array = np.frombuffer(data, dtype, count, start + begin).reshape(shape)
    if entry["dtype"] != "BF16":
        return array
    widened = (array.astype("<u4") << 16).view("<f4")
    widened.setflags(write=False)
    return widened


@dataclass(frozen=True)
class ItemColumn:
    """An item column in slot order.

    A category has a ``dictionary`` of its values, ascending, the ``codes`` of all slots concatenated, and ``offsets`` ``[S +
    1]``, the start of each slot's codes. A column of floats has ``floats`` ``[S]`` instead, NaN for an item without a value.
    """

    name: str
    kind: str
    filter: bool
    dictionary: np.ndarray | None = None
    codes: np.ndarray | None = None
    offsets: np.ndarray | None = None
    floats: np.ndarray | None = None

    def values(self, slot: int) -> list[Any]:
        """Returns the values of the item in a slot."""
        if self.floats is not None:
            number = float(self.floats[slot])
            return [] if math.isnan(number) else [number]
        assert self.dictionary is not None and self.codes is not None and self.offsets is not None
        return self.dictionary[self.codes[self.offsets[slot] : self.offsets[slot + 1]]].tolist()


@dataclass(frozen=True)
class Index:
    """The item index: S slots in C lists, each of which starts at a multiple of 16.

    ``codes`` u8 ``[blocks, G, 16, 4]`` are int8 rows plus 128, ``scales`` f32 ``[S]`` the factors of the codes, ``centroids`` f32
    ``[C, D]``, ``list_lengths`` u32 ``[C]``, ``rows`` ``[S, D]`` the rows for rescoring, or None; ``penalties`` f32 ``[C]`` or
    None.
    """

    dimension: int
    codes: np.ndarray
    scales: np.ndarray
    list_lengths: np.ndarray
    centroids: np.ndarray
    rows: np.ndarray | None = None
    penalties: np.ndarray | None = None

    @cached_property
    def list_starts(self) -> np.ndarray:
        """Returns the first slot of each list, and the number of slots: ``[C + 1]``."""
        return np.concatenate([[0], np.cumsum((self.list_lengths.astype(np.int64) + BLOCK - 1) // BLOCK * BLOCK)])

    @cached_property
    def slots(self) -> np.ndarray:
        """Returns the slots that hold an item, list by list: ``[N]``."""
        lengths = self.list_lengths.astype(np.int64)
        starts = np.repeat(self.list_starts[:-1] - np.cumsum(lengths) + lengths, lengths)
        return starts + np.arange(lengths.sum())

    def members(self, cluster: int) -> np.ndarray:
        """Returns the slots of one list."""
        return np.arange(self.list_starts[cluster], self.list_starts[cluster] + int(self.list_lengths[cluster]))

    def decoded(self, slots: np.ndarray | None = None) -> np.ndarray:
        """Returns the int8 rows as numbers, f32 ``[slots, D]``; by default the rows of all slots."""
        slots = np.arange(len(self.scales)) if slots is None else np.asarray(slots)
        blocks = self.codes[slots // BLOCK, :, slots % BLOCK, :].reshape(len(slots), -1)[:, : self.dimension]
        return (blocks.astype(np.float32) - 128) * self.scales[slots, None]


class Snapshot:
    """A published version; `load_snapshot` opens one."""

    def __init__(self, folder: pathlib.Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.model: dict[str, Any] = _toml(folder / "model.toml")
        self.recipe: dict[str, Any] = _toml(folder / "recipe.toml")
        self.tensors: dict[str, dict[str, np.ndarray]] = {
            name: read_tensors(folder / name) for name in manifest["files"] if name.endswith(".safetensors")
        }

    def __repr__(self) -> str:
        return f"<{self.name} version {self.version}: {self.manifest['items']} items of {self.dimension} in {self.manifest['lists']} lists>"

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.manifest["name"]

    @property
    def version(self) -> int:
        """Number of the version."""
        return self.manifest["version"]

    @property
    def dimension(self) -> int:
        """Width of queries and items, D."""
        return self.manifest["dimension"]

    @cached_property
    def index(self) -> Index:
        """The item index."""
        found = self._file("index.safetensors")
        try:
            return Index(self.dimension, **{name: found[name] for name in ("codes", "scales", "list_lengths", "centroids")},
                         rows=found.get("rows"), penalties=found.get("penalties"))  # fmt: skip
        except KeyError as e:
            raise SnapshotError(f"{self.folder}: index.safetensors has no tensor {e}") from e

    @property
    def ids(self) -> np.ndarray:
        """Ids of the items by slot, i64 ``[S]``; 0 for a slot without an item (`Index.slots` lists the slots with items)."""
        return self._file("columns.safetensors")["ids"]

    def vectors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids i64 ``[N]`` and vectors f32 ``[N, D]`` of all items, from the stored rows of the highest precision."""
        slots = self.index.slots
        rows = self.index.decoded(slots) if self.index.rows is None else self.index.rows[slots].astype(np.float32)
        return self.ids[slots], rows

    @cached_property
    def columns(self) -> dict[str, ItemColumn]:
        """Returns the item columns by name."""
        tensors = self._file("columns.safetensors")
        return {entry["name"]: _column(n, entry, tensors) for n, entry in enumerate(json.loads(bytes(tensors["columns"])))}

    @cached_property
    def item_vectors(self) -> Mapping[str, np.ndarray]:
        """Returns the vectors that are stored per slot for the OverArch, by name ``[S, width]``; int8 rows are decoded to f32
        when they are read."""
        declared = self.model.get("item", {}).get("vectors", [])
        kept = {vector["name"]: {"file": "vectors.safetensors"} | _quantised(vector.get("format")) for vector in declared}
        return _Tables("item vector", kept, self.tensors)

    @property
    def filter(self) -> dict[str, np.ndarray]:
        """Returns the tensors of the filter index."""
        return self._file("filter.safetensors")

    @cached_property
    def tables(self) -> Mapping[str, np.ndarray]:
        """Returns the embedding tables by name ``[rows, width]``; quantized tables are decoded to f32 when they are read."""
        return _Tables("table", {table["name"]: table for table in self.model.get("tables", [])}, self.tensors)

    @cached_property
    def vocabularies(self) -> dict[str, list[str]]:
        """Returns the vocabulary of each table that has one; the index of a value is its row in the table."""
        tables = [table for table in self.model.get("tables", []) if "vocabulary" in table]
        return {table["name"]: _lines(self.folder / table["vocabulary"]) for table in tables}

    @property
    def graphs(self) -> dict[str, bytes]:
        """Returns the ONNX graphs by file name."""
        return {name: (self.folder / name).read_bytes() for name in self.manifest["files"] if name.endswith(".onnx")}

    @cached_property
    def parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the weights of each graph file, by the names of the exported module: ``load_state_dict`` takes these as tensors."""
        return {name: weights(graph) for name, graph in self.graphs.items()}

    @property
    def programs(self) -> dict[str, dict[str, str]]:
        """Returns the way each graph ran when the version was published: ``{"program": digest}``, or ``{"runtime": why}``;
        empty for older versions."""
        return self.manifest.get("graphs") or {}

    def _file(self, name: str) -> dict[str, np.ndarray]:
        if name not in self.tensors:
            raise SnapshotError(f"{self.folder}: the manifest names no {name}")
        return self.tensors[name]


class _Tables(Mapping[str, np.ndarray]):
    def __init__(self, what: str, declared: dict[str, dict[str, Any]], tensors: dict[str, dict[str, np.ndarray]]):
        self._what, self._declared, self._tensors = what, declared, tensors

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._declared[name]
        stored = self._tensors.get(entry["file"], {}).get(name)
        if stored is None:
            raise SnapshotError(f"{self._what} `{name}`: {entry['file']} holds no tensor of that name")
        return decoded(stored, entry["format"]) if "format" in entry else stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)


def _quantised(format: str | None) -> dict[str, str]:
    return {"format": format} if format in _CODES else {}


def decoded(stored: np.ndarray, format: str) -> np.ndarray:
    """Decodes rows in ``int8``, ``int4`` or ``int2`` (``docs/reference/formats.md``) to f32.

    >>> row = np.concatenate([np.array([0.5, -1.0], "<f2").view("u1"), np.array([0, 2, 4], "u1")])
    >>> decoded(row[None], "int8")
    array([[-1.,  0.,  1.]], dtype=float32)
    """
    if format not in _CODES:
        raise SnapshotError(f"format `{format}`, expected one of: {', '.join(_CODES)}")
    bits = _CODES[format]
    scale, bias = np.ascontiguousarray(stored[:, :4]).view("<f2").astype(np.float32).T
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (stored[:, 4:, None] >> shifts & (2**bits - 1)).reshape(len(stored), -1)
    return codes.astype(np.float32) * scale[:, None] + bias[:, None]


def _column(place: int, entry: dict[str, Any], tensors: Mapping[str, np.ndarray]) -> ItemColumn:
    part = lambda name: tensors[f"c{place}.{name}"]  # noqa: E731
    named = {"name": entry["name"], "kind": entry["kind"], "filter": entry.get("filter", True)}
    try:
        if f"c{place}.floats" in tensors:
            return ItemColumn(**named, floats=part("floats"))
        if entry["kind"] == "texts":
            text, ends = bytes(part("text_bytes")), part("text_offsets").tolist()
            dictionary = np.array([text[a:b].decode() for a, b in zip(ends, ends[1:])], dtype=object)
        else:
            dictionary = part("integers")
        return ItemColumn(**named, dictionary=dictionary, codes=part("codes"), offsets=part("offsets"))
    except KeyError as e:
        raise SnapshotError(f"column `{entry['name']}`: columns.safetensors has no tensor {e}") from e


def _lines(path: pathlib.Path) -> list[str]:
    text = path.read_bytes().decode()
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _toml(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SnapshotError(f"{path}: {e}") from e


def load_snapshot(path: str | os.PathLike[str], *, check: bool = True) -> Snapshot:
    """Opens the version in the folder ``path``, such as ``store/debian/1``.

    With ``check``, compares the length and the XXH3-128 of every file with the manifest. Raises `SnapshotError` with the file,
    the actual value and the expected value.
    """
    folder = pathlib.Path(path)
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SnapshotError(f"{folder}: no published version: {e}") from e
    if not isinstance(manifest, dict):
        raise SnapshotError(f"{folder}: manifest.json is no object")
    number = manifest.get("format")
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise SnapshotError(f"{folder}: format {number}, expected 1 to {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(files.get(name), dict) for name in ("index.safetensors", "model.toml")):
        raise SnapshotError(f"{folder}: the manifest names no index.safetensors and model.toml")
    for name, expected in files.items():
        if "/" in name or "\\" in name or name.startswith("."):
            raise SnapshotError(f"{folder}: file `{name}`, expected a plain name inside the version")
        if check:
            _check(folder / name, expected)
    return Snapshot(folder, manifest)


def _check(path: pathlib.Path, expected: Mapping[str, Any]) -> None:
    import xxhash  # imported here, because no other module of the package needs xxhash

    hashed, count = xxhash.xxh3_128(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                hashed.update(chunk)
                count += len(chunk)
    except OSError as e:
        raise SnapshotError(f"{path}: {e.strerror}") from e
    if count != expected.get("bytes"):
        raise SnapshotError(f"{path}: got {count} bytes, expected {expected.get('bytes')}")
    if hashed.hexdigest() != expected.get("xxh3"):
        raise SnapshotError(f"{path}: got checksum {hashed.hexdigest()}, expected {expected.get('xxh3')}")
