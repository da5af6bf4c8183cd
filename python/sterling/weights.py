"""Weights of ONNX graphs, by the names of the exported modules.

Reads the few fields of the format (<https://onnx.ai/onnx/repo-docs/IR.html>) that hold weights, so that the package ``onnx`` is not needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import SnapshotError

PREFIX = "module."
"""Prefix of the names of a module's parameters in the files that `export` writes."""

# Fields of ONNX messages: graph of a model; initializers of a graph; dims, type, floats, name, bytes of a tensor.
_GRAPH, _INITIALIZER, _DIMS, _TYPE, _FLOATS, _NAME, _RAW = 7, 5, 1, 2, 4, 8, 9


def weights(onnx: bytes) -> dict[str, np.ndarray]:
    """Returns the weights of an exported graph, f32, by the names of the module: ``module.load_state_dict`` takes them as tensors.

    Raises `SnapshotError` if the bytes are not an ONNX file.
    """
    found = {}
    try:
        for graph in (value for number, value in _fields(onnx) if number == _GRAPH):
            for tensor in (value for number, value in _fields(graph) if number == _INITIALIZER):
                fields: dict[int, list[Any]] = {}
                for number, value in _fields(tensor):
                    fields.setdefault(number, []).append(value)
                name = bytes(fields.get(_NAME, [b""])[0]).decode()
                if fields.get(_TYPE) != [1] or "." not in name or "::" in name:
                    continue
                stored = b"".join(bytes(part) for part in fields.get(_RAW, fields.get(_FLOATS, [])))
                dims = [dim for part in fields.get(_DIMS, []) for dim in ([part] if isinstance(part, int) else _varints(part))]
                found[name.removeprefix(PREFIX)] = np.frombuffer(stored, "<f4").reshape(dims).copy()
    except (IndexError, ValueError) as e:
        raise SnapshotError(f"not an ONNX file: {e}") from e
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            return value, at


def _varints(data: memoryview) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found


def _fields(data: bytes | memoryview) -> list[tuple[int, Any]]:
    """Returns the fields of a protobuf message: numbers as int, all others as bytes."""
    data, at, found = memoryview(data), 0, []
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            found.append((key >> 3, value))
            continue
        length, at = _varint(data, at) if key & 7 == 2 else ({1: 8, 5: 4}[key & 7], at) if key & 7 in (1, 5) else (-1, at)
        if length < 0 or at + length > len(data):
            raise ValueError(f"a field of wire type {key & 7} at byte {at} of {len(data)}")
        found.append((key >> 3, data[at : at + length]))
        at += length
    return found
