"""State of training between PyTorch and ``sterling train`` (``docs/guide/train.md``).

`write_optimizer` puts the state of PyTorch's optimizers into an exported package, so that ``sterling train`` continues where PyTorch
stopped. `load_trained` returns tables, weights and optimizer state of a trained package as NumPy arrays, by the names of the modules' parameters.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import ExportError, SnapshotError
from .snapshot import _Tables, _toml, read_tensors
from .weights import PREFIX, weights

OPTIMIZER_FILE = "optimizer.safetensors"
# Names of the state by optimizer, in the order of docs/internals/learning.md.
_MOMENTS = {"SGD": (), "Adagrad": ("sum",), "Adam": ("exp_avg", "exp_avg_sq"), "AdamW": ("exp_avg", "exp_avg_sq"), "SparseAdam": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Trained:
    """A trained package.

    ``tables`` are f32 ``[rows, D]`` by name; ``parameters`` the weights by graph (``user``, ``item``, ``reranker``) and name of the module's
    parameter. ``state`` are the tensors of ``optimizer.safetensors``, empty without that file: ``table.NAME.state``,
    ``graph.NAME.PARAMETER.moment.N`` (``docs/reference/formats.md``).
    """

    tables: Mapping[str, np.ndarray]
    parameters: dict[str, dict[str, np.ndarray]]
    state: dict[str, np.ndarray]


def load_trained(package: str | os.PathLike[str]) -> Trained:
    """Opens a package that ``sterling train`` wrote.

    Raises `SnapshotError` if a file is missing or damaged.
    """
    folder = pathlib.Path(package)
    model = _toml(folder / "model.toml")
    declared = {table["name"]: table for table in model.get("tables", [])}
    tensors = {table["file"]: read_tensors(folder / table["file"]) for table in declared.values()}
    tables = {name: np.asarray(rows, np.float32) for name, rows in _Tables("table", declared, tensors).items()}
    parameters = {name: weights(_read(folder / file)) for name, file in _graphs(model).items()}
    state = folder / OPTIMIZER_FILE
    return Trained(tables, parameters, read_tensors(state) if state.exists() else {})


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise SnapshotError(f"{path}: {e.strerror}") from e


def _graphs(model: Mapping[str, Any]) -> dict[str, str]:
    """Returns the file of each graph, by the graph's name in the training state."""
    files = {"user": model.get("user", {}).get("tower"), "item": model.get("item", {}).get("tower")}
    files["reranker"] = model.get("overarch", {}).get("graph")
    return {name: file for name, file in files.items() if file}


def write_optimizer(
    package: str | os.PathLike[str],
    *optimizers: Any,
    tables: Mapping[str, Any] | None = None,
    user: Any = None,
    item: Any = None,
    overarch: Any = None,
) -> None:
    """Writes the state of PyTorch's optimizers to an exported package; ``sterling train`` continues from this state.

    ``optimizers``
        ``torch.optim`` SGD without momentum, Adagrad, Adam, AdamW or SparseAdam, after their last step.
    ``tables``
        The weight of each table, as given to `export`, or the state of TorchRec's and FBGEMM's fused optimizers as a mapping:
        ``{"momentum1": [rows]}`` of row-wise Adagrad, ``{"momentum1": [rows, D]}`` of Adagrad, with ``momentum2`` ``[rows, D]`` or ``[rows]`` and
        ``step`` of Adam or row-wise Adam.
    ``user``, ``item``, ``overarch``
        The exported modules.

    ``[train]`` of the package must name the same optimizers. Tables and graphs without state begin at zero. Rows of Adam count their own updates,
    and begin with the step of PyTorch. Raises `ExportError` with the parameter that the package does not have.
    """
    folder = pathlib.Path(package)
    model = _toml(folder / "model.toml")
    own = {id(parameter): (optimizer, state) for optimizer in optimizers for parameter, state in optimizer.state.items()}
    tensors: dict[str, np.ndarray] = {}
    steps, dense_steps = 0, []
    declared = {table["name"] for table in model.get("tables", [])}
    for name, table in (tables or {}).items():
        if name not in declared:
            raise ExportError(f"table `{name}`: the package has no such table, expected one of: {', '.join(sorted(declared))}")
        state = table if isinstance(table, Mapping) else _of_table(table, own)
        if state is not None:
            tensors[f"table.{name}.state"], step = _rows(name, state)
            steps = max(steps, step)
    for name, module in (("user", user), ("item", item), ("reranker", overarch)):
        file = _graphs(model).get(name)
        if module is None:
            continue
        if file is None:
            raise ExportError(f"{name}: the package has no such graph")
        known, reached = weights(_read(folder / file)), set()
        for parameter, value in module.named_parameters():
            if id(value) not in own:
                continue
            optimizer, state = own[id(value)]
            if parameter not in known or known[parameter].shape != tuple(value.shape):
                raise ExportError(f"{file}: no parameter `{parameter}` {list(value.shape)}, expected the parameters of the exported module")
            moments = _moments(f"{name}: `{parameter}`", optimizer, state)
            for n, moment in enumerate(moments):
                tensors[f"graph.{name}.{PREFIX}{parameter}.moment.{n}"] = moment
            reached.add(int(state.get("step", 0)))
        if len(reached) > 1:
            raise ExportError(f"{name}: parameters have different step counts {sorted(reached)}, expected the same count")
        dense_steps += [[name, step] for step in reached]
    about = {"table_steps": steps, "counted_events": 0, "dense_steps": dense_steps}
    tensors["about"] = np.frombuffer(json.dumps(about).encode(), "u1")
    # Removes the checksum of an earlier state, which `sterling train` wrote.
    (folder / "optimizer.checksum.json").unlink(missing_ok=True)
    _write(folder / OPTIMIZER_FILE, tensors)


def _moments(place: str, optimizer: Any, state: Mapping[str, Any]) -> list[np.ndarray]:
    kind = type(optimizer).__name__
    if kind not in _MOMENTS:
        raise ExportError(f"{place}: optimizer {kind}, expected one of: {', '.join(_MOMENTS)}")
    if state.get("momentum_buffer") is not None or state.get("max_exp_avg_sq") is not None:
        raise ExportError(f"{place}: {kind} with momentum or amsgrad, expected neither of them")
    return [_numbers(state[name]) for name in _MOMENTS[kind]]


def _numbers(tensor: Any) -> np.ndarray:
    return np.ascontiguousarray(tensor.detach().cpu().float().numpy() if hasattr(tensor, "detach") else tensor, np.float32)


def _of_table(table: Any, own: Mapping[int, tuple[Any, Mapping[str, Any]]]) -> Mapping[str, Any] | None:
    """Returns the state of a table's weight in the form of fused optimizers."""
    weight = getattr(table, "weight", table)
    if id(weight) not in own:
        return None
    optimizer, state = own[id(weight)]
    moments = _moments("table", optimizer, state)
    return {f"momentum{n + 1}": moment for n, moment in enumerate(moments)} | {"step": int(state.get("step", 0))}


def _rows(name: str, state: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    """Returns the state of a table's rows ``[rows, S]``, and the number of steps."""
    moments = [_numbers(state[key]) for key in ("momentum1", "momentum2") if key in state]
    if not moments or any(len(moment) != len(moments[0]) or moment.ndim > 2 for moment in moments):
        raise ExportError(f"table `{name}`: state {sorted(state)}, expected momentum1 and optionally momentum2 of the table's rows")
    step = int(state.get("step", state.get("iter", 0)))
    parts = [moment.reshape(len(moment), -1) for moment in moments]
    if len(parts) == 2:
        # The number of updates of each row, with its bits stored as f32.
        parts.append(np.full((len(parts[0]), 1), step, np.uint32).view(np.float32))
    return np.ascontiguousarray(np.concatenate(parts, 1)), step


def _write(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, tensor in tensors.items():
        kind = "U8" if tensor.dtype == np.uint8 else "F32"
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())
    temporary.replace(path)
