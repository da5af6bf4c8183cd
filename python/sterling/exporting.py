"""Exports trained PyTorch modules as a model package that ``sterling publish`` accepts."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from . import toml
from .errors import ExportError
from .features import MERGES, Column, Dense, Feature, Ids, ItemVector, LookedUp, Query, is_missing, one_of
from .tables import Table, agree, collect

if TYPE_CHECKING:
    from .reference import Reference

_MISSING = "torch, onnx, onnxscript and safetensors are needed to export: pip install torch onnx onnxscript onnxruntime safetensors"
# Minimum number of samples to write: with fewer queries, the measured recall does not predict that of other queries.
SAMPLES_MIN = 16
_WRITTEN = "# Written by sterling.export.\n"
_FILES = "# It replaces these files when it writes here again: "


@dataclass(frozen=True)
class Exported:
    """A written package.

    ``differences`` holds the largest difference between PyTorch and ONNX Runtime per graph (None if ONNX Runtime is not installed). If
    samples, items and the program were available, it also holds ``served``: the largest difference of queries, similarities and
    task scores between PyTorch and a server. ``reference`` computes the expected answers of a server in PyTorch.
    """

    path: pathlib.Path
    differences: dict[str, float | None]
    reference: Reference = field(repr=False)

    @property
    def largest(self) -> float:
        """Largest of the measured differences."""
        return max((value for value in self.differences.values() if value is not None), default=0.0)

    def __str__(self) -> str:
        shown = (f"{name} {'not compared' if value is None else f'{value:.1e}'}" for name, value in self.differences.items())
        return f"{self.path}: largest differences: {', '.join(shown)}"


def export(
    path: str | pathlib.Path,
    *,
    name: str | None = None,
    description: str = "",
    user: Any = None,
    item: Any = None,
    overarch: Any = None,
    tables: Any = None,
    features: Mapping[str, Sequence[Feature]] | None = None,
    dimension: int | None = None,
    item_vectors: Sequence[ItemVector] = (),
    columns: Sequence[Column | str] = (),
    queries: Sequence[Query] = (),
    merge: str = "union",
    tasks: Sequence[str] = (),
    value: str | None = None,
    constants: Mapping[str, float] | None = None,
    samples: Sequence[Mapping[str, Any]] = (),
    items: Sequence[Mapping[str, Any]] | None = None,
    tolerance: float = 1e-3,
    program: str | pathlib.Path | bool | None = None,
    exporter: str | None = None,
) -> Exported:
    """Writes a model package to the folder ``path`` and measures how far its results are from those of the modules.

    ``user``, ``item``, ``overarch``
        ``torch.nn.Module``. The parameters of ``forward`` are the graph's inputs, by name: features (``NAME_mask`` the mask of a
        sequence) of the towers; for the OverArch ``query`` ``[Q, D]``, ``item`` ``[Q, K0, D]``, features of the candidates ``[Q, K0, ...]``,
        and the other inputs in ``models/README.md``.
        A parameter with a default that nothing feeds is left out.
        The modules return a tensor, or a mapping of names to tensors: ``query``, ``item`` and ``logits`` ``[Q, K0, tasks]``, and tensors that
        the OverArch reads. If forward takes ``*inputs``, they have the order of the features.
    ``tables``
        ``{"name": nn.Embedding | nn.EmbeddingBag | tensor | Table}``, a TorchRec ``EmbeddingBagCollection`` or ``EmbeddingCollection``, or a
        list of these.
    ``features``
        ``{"user": [...], "item": [...], "overarch": [...]}`` of `Ids`, `Category`, `Text` and `Dense`. Features of a TorchRec
        collection need not be repeated; they are `Ids`.
    ``dimension``
        D; by default the width of the towers' outputs.
    ``columns``
        Item columns to store; None stores all.
    ``queries``, ``merge``
        If ``query`` is ``[Q, Tq, D]``: the rows of its axis Tq, and the rule that merges their candidates.
    ``tasks``, ``value``, ``constants``
        Names along the last axis of ``logits``, the expression that orders results (``docs/reference/value-model.md``) and its constants.
    ``samples``, ``items``
        Features of real users as in requests, and items as rows with an ``id``. Items are written as ``items.jsonl``. Samples are
        written as ``queries.jsonl``, from which ``sterling publish`` takes up to 256 to measure recall: pass some hundred samples, and none of users
        whose recall you measure afterwards. Fewer than 16 samples are not written. With samples and items the package is also published and
        served by the ``sterling`` program, if it is found, and compared: the queries of all samples, and up to 32 answers.
    ``tolerance``
        Largest accepted difference, relative to the larger of 1 and the value.
    ``program``
        The ``sterling`` program; None finds it (``$STERLING``, then ``PATH``), False skips its checks.
    ``exporter``
        ``dynamo`` or ``torchscript``, PyTorch's exporters of ONNX. None takes ``dynamo``, and ``torchscript`` for modules that ``dynamo``
        cannot export, unless the modules branch on the values of a tensor.

    An existing package is replaced in one step; a killed process leaves the old package. Files that no export wrote stay. Raises
    `ExportError`; ``path`` is then unchanged.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError as e:
        raise ExportError(f"{_MISSING} ({e})") from e
    if "://" in str(path):
        raise ExportError(f"{path}: is a URL, expected a folder of this machine")
    from .exporters import EXPORTERS
    from .graphs import unwrapped

    path = pathlib.Path(path)
    real = path.resolve()
    if real.exists() and not real.is_dir():
        raise ExportError(f"{path}: is a file, expected a folder")
    if exporter is not None:
        one_of("exporter", exporter, EXPORTERS)
    user, item, overarch = unwrapped(user), unwrapped(item), unwrapped(overarch)
    by_side = {side: list(some) for side, some in (features or {}).items()}
    rows: dict[str, Sequence[Mapping[str, Any]]] = {"user": samples, "item": items or ()}
    draft = _Draft(collect(tables), by_side, list(item_vectors), tuple(tasks), rows, exporter)
    draft.check(dimension, queries, user, item, overarch)
    one_of("merge", merge, MERGES)
    draft.towers(user, item, dimension, len(queries))
    if overarch is not None:
        draft.reranker(overarch, [c if isinstance(c, str) else c.name for c in columns])
    elif tasks:
        raise ExportError("tasks are given without overarch, expected the module that predicts them")
    draft.used()
    spec = draft.spec(name or path.name or real.name, description, columns, queries, merge, value, constants or {})
    reference = draft.reference(queries, merge)
    with _writing(path):
        real.parent.mkdir(parents=True, exist_ok=True)
    with _writing(path), tempfile.TemporaryDirectory(prefix=f".{real.name}-", dir=real.parent) as made:
        folder = pathlib.Path(made) / real.name
        folder.mkdir()
        draft.write(folder, spec, items, samples)
        differences = _compared(draft, folder, reference, samples, items, tolerance, program)
        _place(folder, real)
    if draft.user is not None and len(samples) < SAMPLES_MIN:
        warnings.warn(
            f"samples: {len(samples)} users' features are given, expected at least {SAMPLES_MIN}, better 256: without queries.jsonl `sterling publish` "
            "measures recall with the requests of the version before, else with perturbed items, and users may find far less than they ask for",
            stacklevel=2,
        )
    return Exported(path, differences, reference)


@contextlib.contextmanager
def _writing(path: pathlib.Path) -> Iterator[None]:
    """Adds the package's path to the error when its folder cannot be written."""
    try:
        yield
    except OSError as e:
        raise ExportError(f"{path}: cannot be written: {e}") from e


def _compared(
    draft: _Draft,
    folder: pathlib.Path,
    reference: Reference,
    samples: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]] | None,
    tolerance: float,
    program: str | pathlib.Path | bool | None,
) -> dict[str, float | None]:
    from . import parity
    from .program import find_program

    differences: dict[str, float | None] = {graph.file: graph.difference for graph in draft.graphs()}
    for graph in draft.graphs():
        if graph.difference is not None and not graph.difference <= tolerance:
            raise ExportError(
                f"{graph.file}: differs from PyTorch by {graph.difference:.2e}, expected at most {tolerance:.0e}; most {graph.differs_for()}"
            )
    if samples:
        parity.readable(reference, samples)
    found = None if program is False else find_program(None if program in (None, True) else program, required=program is not None)
    if found and samples and items:
        differences["served"], sample = parity.served(reference, folder, samples, items, found)
        if not differences["served"] <= tolerance:
            raise ExportError(
                f"served: differs from PyTorch by {differences['served']:.2e}, expected at most {tolerance:.0e}; most for the features {sample!r:.500}"
            )
    return differences


def _place(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Moves a finished package to its path in one step; files of the older package that no export wrote are carried over."""
    try:
        if not path.exists():
            folder.rename(path)
            return
        written = _written(path)
        for entry in path.iterdir():
            if entry.name not in written and not (folder / entry.name).exists():
                _bring(entry, folder / entry.name)
        shutil.copymode(path, folder)
        _exchange(folder, path)
    except OSError as e:
        raise ExportError(f"{path}: cannot be replaced: {e}") from e


def _written(path: pathlib.Path) -> set[str]:
    """Returns the files that the last export wrote to a folder, according to its ``model.toml``."""
    with contextlib.suppress(OSError, ValueError):
        for line in (path / "model.toml").read_text(encoding="utf-8").splitlines():
            if line.startswith(_FILES):
                return set(json.loads(line.removeprefix(_FILES)))
    return set()


def _bring(file: pathlib.Path, to: pathlib.Path) -> None:
    """Links a file or folder at a second path; copies the bytes only if links are not possible."""

    def linked(one: str, other: str) -> None:
        try:
            os.link(one, other, follow_symlinks=False)
        except OSError:
            shutil.copy2(one, other, follow_symlinks=False)

    if file.is_dir() and not file.is_symlink():
        shutil.copytree(file, to, symlinks=True, copy_function=linked)
    else:
        linked(str(file), str(to))


def _exchange(one: pathlib.Path, other: pathlib.Path) -> None:
    """Swaps two folders. On Linux this is one step; elsewhere the swap takes two renames, between which `other` is missing."""
    if sys.platform == "linux":
        at_cwd, exchange = -100, 2
        rename = getattr(ctypes.CDLL(None), "renameat2", None)
        if rename is not None and rename(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0:
            return
    aside = one.with_name(f"{one.name}.old")
    other.rename(aside)
    try:
        one.rename(other)
    except OSError:
        aside.rename(other)
        raise


class _Draft:
    """State of a package while it is being written."""

    def __init__(
        self,
        tables: dict[str, Table],
        features: dict[str, list[Feature]],
        vectors: list[ItemVector],
        tasks: tuple[str, ...],
        rows: dict[str, Sequence[Mapping[str, Any]]],
        exporter: str | None,
    ):
        self.tables, self.features, self.vectors, self.tasks, self.rows, self.exporter = tables, features, vectors, tasks, rows, exporter
        self.user = self.item = self.overarch = None
        self.dimension = 0

    def check(self, dimension: int | None, queries: Sequence[Query], user: Any, item: Any, overarch: Any) -> None:
        unknown = [side for side in self.features if side not in ("user", "item", "overarch")]
        if unknown:
            raise ExportError(f"features of `{unknown[0]}`, expected features of user, item or overarch")
        if user is None and item is None and dimension is None:
            raise ExportError("dimension is missing, and no tower has an output to take it from")
        if user is None and queries:
            raise ExportError("queries are given without user, expected the user tower, which computes the queries")
        for side, some in self.features.items():
            names = [feature.name for feature in some]
            if len(set(names)) != len(names):
                raise ExportError(f"{side}.features: `{max(names, key=names.count)}` is given twice")
            for feature in some:
                self.check_feature(side, feature)
            some[:] = [self.resolved(feature) for feature in some]
        for side, module in (("user", user), ("item", item), ("overarch", overarch)):
            if module is None and self.features.get(side):
                raise ExportError(f"features of `{side}` are given without {side}, expected the module that reads them")

    def check_feature(self, side: str, feature: Feature) -> None:
        place = f"{side}.features `{feature.name}`"
        if side == "overarch" and isinstance(feature, Dense):
            raise ExportError(f"{place}: expected ids or categories; the OverArch reads numeric item columns by their name")
        if not isinstance(feature, LookedUp):
            return
        if feature.table not in self.tables:
            raise ExportError(f"{place}: table `{feature.table}` is not given, expected one of: {', '.join(self.tables) or 'none'}")
        if feature.kind == "category" and self.tables[feature.table].vocabulary is None:
            raise ExportError(f"{place}: table `{feature.table}` has no vocabulary; give Table(weight, vocabulary=[...])")
        if feature.kind == "text" and self.tables[feature.table].tokenizer is None:
            raise ExportError(f"{place}: table `{feature.table}` has no tokenizer; give Table(weight, tokenizer=...)")

    def resolved(self, feature: Feature) -> Feature:
        """Returns a feature with the pooling and weighting of the module that looks up its rows."""
        if not isinstance(feature, LookedUp):
            return feature
        table = self.tables[feature.table]
        if table.pooling is not None and feature.pooling in ("sum", "mean") and feature.pooling != table.pooling:
            raise ExportError(
                f"feature `{feature.name}`: pooling `{feature.pooling}`, but table `{feature.table}` pools by `{table.pooling}`; expected the same, or "
                "none; to use both, give the weight as a table of its own"
            )
        feature = replace(feature, pooling=feature.pooling or table.pooling or "sum", weights=feature.weights and table.is_weighted)
        agree(feature.table, table, feature.pooling or "sum")
        return feature

    def input_of(self, side: str, name: str, *, is_fed: bool = True) -> Any:
        """Returns the feature of an input; None if no feature feeds it.

        With ``is_fed``, the input may also be a feature of a TorchRec collection that is not declared.
        """
        from .graphs import Port

        for feature in self.features.get(side, ()):
            if isinstance(feature, Dense) and feature.name == name:
                # Item features are required; user features may be missing.
                return Port(name, (*_LEAD[side], feature.width), seen=self.numbers(side, feature), may_be_missing=side == "user")
            if isinstance(feature, LookedUp) and name in (feature.name, f"{feature.name}_mask"):
                width = self.tables[feature.table].weight.shape[1]
                axes = (*_LEAD[side], *((feature.length,) if feature.is_sequence else ()))
                if name == feature.name:
                    return Port(name, (*axes, width), is_sequence=feature.is_sequence, may_be_missing=True)
                if feature.is_sequence:
                    return Port(name, axes, is_mask=True)
        fed = [table for table in self.tables if is_fed and name in self.tables[table].features]
        if len(fed) > 1:
            ways = ", ".join(f'Ids("{name}_{table}", "{table}", column="{name}")' for table in fed)
            raise ExportError(
                f"{side}: forward takes `{name}`, which the tables {' and '.join(fed)} both feed; declare one feature for each, {ways}, and let forward take these"
            )
        if fed and self.tables[fed[0]].pooling is None:
            raise ExportError(
                f"{side}: forward takes `{name}`, which an EmbeddingCollection feeds without pooling; declare the feature: "
                f'Ids("{name}", "{fed[0]}", pooling="none", length=...)'
            )
        if fed:
            self.features.setdefault(side, []).append(self.resolved(Ids(name, fed[0])))
            return self.input_of(side, name)
        return None

    def numbers(self, side: str, feature: Dense) -> Any:
        """Returns the values of a dense feature in the samples or items, ``[rows, width]``; None without rows."""
        import torch

        from .reference import dense

        rows = self.rows.get(side, ())
        return torch.stack([dense(feature, row) for row in rows]) if rows else None

    def towers(self, user: Any, item: Any, dimension: int | None, queries: int) -> None:
        for side, module, output in (("user", user, "query"), ("item", item, "item")):
            if module is None:
                continue
            graph = self.tower(side, module, output, ("Q", queries) if queries and side == "user" else _LEAD[side])
            setattr(self, side, graph)
            width = graph.outputs[output][-1]
            if dimension is not None and width != dimension:
                raise ExportError(f"{side}: `{output}` is {width} wide, expected {dimension}")
            dimension = width
        self.dimension = dimension or 0
        for vector in self.vectors:
            if vector.column is None and (self.item is None or self.item.outputs.get(vector.name) != ("N", vector.width)):
                made = {} if self.item is None else self.item.outputs
                raise ExportError(
                    f"item vector `{vector.name}`: the item tower makes {made or 'nothing'}, expected `{vector.name}` [N, {vector.width}] "
                    "among its outputs, or a column of the items"
                )

    def tower(self, side: str, module: Any, output: str, lead: tuple[Any, ...]) -> Any:
        from .graphs import export_graph, parameters

        names = parameters(side, module)
        if names is None:
            names = dict.fromkeys((feature.name for feature in self.features.get(side, ())), False)
        ports = []
        for name, may_be_left_out in names.items():
            port = self.input_of(side, name)
            if port is None and may_be_left_out:
                continue
            if port is None:
                known = ", ".join(feature.name for feature in self.features.get(side, ())) or "none is given"
                raise ExportError(f"{side}: forward takes `{name}`, which is no feature, expected some of: {known}")
            ports.append(port)
        if not ports:
            raise ExportError(f"{side}: forward takes nothing, expected features")
        ports = self.apart(side, output, ports)
        lead_axes = tuple(axis for axis in lead if isinstance(axis, str))
        graph = export_graph(side, module, ports, output, lead_axes, self.exporter)
        shape = graph.outputs[output]
        if len(shape) != len(lead) + 1 or shape[: len(lead)] != lead:
            raise ExportError(f"{side}: output `{output}` has shape {list(shape)}, expected {[*lead, 'D']}")
        return graph

    def apart(self, side: str, output: str, ports: list[Any]) -> list[Any]:
        """Renames, in the graph, a feature that has the name of its tower's output; the name in requests and items does not change."""
        free = next(name for n in itertools.count() if (name := f"{output}_feature{n or ''}") not in {port.name for port in ports})
        some = self.features.get(side, [])
        some[:] = [replace(feature, name=free, column=feature.source) if feature.name == output else feature for feature in some]  # type: ignore[type-var]
        names = {output: free, f"{output}_mask": f"{free}_mask"} if any(feature.name == free for feature in some) else {}
        return [replace(port, name=names[port.name], parameter=port.name) if port.name in names else port for port in ports]

    def reranker(self, module: Any, columns: Sequence[str]) -> None:
        from .graphs import Port, export_graph, parameters

        names = parameters("overarch", module)
        if names is None:
            raise ExportError("overarch: forward takes *inputs, expected a parameter for each input: `query`, `item` and others by name")
        if not self.tasks:
            raise ExportError("tasks are missing, expected a name for each of the overarch's logits")
        queries = self.user.outputs["query"] if self.user else ("Q", self.dimension)
        known: dict[str, Port] = {
            "query": Port("query", queries),
            "item": Port("item", ("Q", "K0", self.dimension)),
            "similarity": Port("similarity", ("Q", "K0")),
        }
        known |= {v.name: Port(v.name, ("Q", "K0", v.width)) for v in self.vectors}
        if self.user:
            known |= {output: Port(output, shape) for output, shape in self.user.outputs.items() if output != "query"}
        ports = []
        for name, may_be_left_out in names.items():
            port = known.get(name)
            for side in ("overarch", "user"):
                # Features of a collection may belong to the user or to the candidates; the declaration decides.
                port = port or self.input_of(side, name, is_fed=False)
            if port is None and may_be_left_out and name not in columns and not any(name in row for row in self.rows["item"]):
                continue
            ports.append(port or self.column(name, columns))
        graph = export_graph("overarch", module, ports, "logits", ("Q", "K0"), self.exporter)
        if graph.outputs["logits"] != ("Q", "K0", len(self.tasks)):
            shape = list(graph.outputs["logits"])
            raise ExportError(f"overarch: `logits` has shape {shape}, expected ['Q', 'K0', {len(self.tasks)}] for the tasks {', '.join(self.tasks)}")
        self.overarch = graph

    def column(self, name: str, columns: Sequence[str]) -> Any:
        import torch

        from .graphs import Port
        from .reference import number

        if columns and name not in columns:
            raise ExportError(
                f"overarch: forward takes `{name}`, which is neither query, item, similarity, a feature, an output of the user tower, an "
                f"item vector nor one of the columns: {', '.join(columns)}"
            )
        items = self.rows["item"]
        if items and not any(name in row for row in items):
            raise ExportError(f"overarch: forward takes `{name}`, which is neither a column of the items nor another input of an OverArch")
        return Port(name, ("Q", "K0"), seen=torch.tensor([number(name, row) for row in items]) if items else None)

    def used(self) -> None:
        """Rejects features and tables that no graph reads."""
        read = {"user": set(), "item": set(), "overarch": set()}
        for graph, sides in ((self.user, ("user",)), (self.item, ("item",)), (self.overarch, ("overarch", "user"))):
            for side in sides:
                read[side] |= {port.name for port in graph.inputs} if graph else set()
        for side, some in self.features.items():
            for feature in some:
                if feature.name not in read[side]:
                    takes = ", ".join(sorted(read[side])) or "nothing"
                    raise ExportError(f"{side}.features `{feature.name}`: no graph reads this feature; graphs take {takes}")
        looked = {feature.table for some in self.features.values() for feature in some if isinstance(feature, LookedUp)}
        for table in self.tables:
            if table not in looked:
                raise ExportError(f"table `{table}`: no feature reads this table, expected a feature of user, item or overarch that does")

    def graphs(self) -> list[Any]:
        return [graph for graph in (self.user, self.item, self.overarch) if graph]

    def spec(
        self,
        name: str,
        description: str,
        columns: Sequence[Column | str],
        queries: Sequence[Query],
        merge: str,
        value: str | None,
        constants: Mapping[str, float],
    ) -> dict[str, Any]:
        """Returns the content of ``model.toml``."""
        spec: dict[str, Any] = {"name": name, "description": description, "dimension": self.dimension, "tables": []}
        for table, what in self.tables.items():
            vocabulary = {"vocabulary": f"{table}.txt"} if what.vocabulary is not None else {}
            vocabulary |= {"tokenizer": f"{table}.tokenizer.json"} if what.tokenizer is not None else {}
            managed = {"managed": True} if what.ids is not None else {}
            spec["tables"].append({"name": table, "file": "tables.safetensors", "unseen": what.unseen} | vocabulary | managed)
        declared = {side: [feature.declared() for feature in some] for side, some in self.features.items()}
        if self.user:
            spec["user"] = {"tower": self.user.file} | ({"merge": merge} if queries else {})
            spec["user"] |= {"queries": [query.declared() for query in queries], "features": declared.get("user", [])}
        spec["item"] = ({"tower": self.item.file} if self.item else {}) | {"vectors": [vector.declared() for vector in self.vectors]}
        spec["item"] |= {"features": declared.get("item", [])}
        spec["item"]["columns"] = [(Column(c) if isinstance(c, str) else c).declared() for c in columns]
        spec["tasks"] = [{"name": task} for task in self.tasks]
        if self.overarch:
            spec["overarch"] = {"graph": self.overarch.file, "features": declared.get("overarch", [])}
        if value is not None or constants:
            if value is None:
                raise ExportError("constants are given without value, expected the expression that uses them")
            spec["value"] = {"expression": value, "constants": {key: float(number) for key, number in constants.items()}}
        return _without_empty(spec)

    def reference(self, queries: Sequence[Query], merge: str) -> Reference:
        from .reference import Reference

        return Reference(
            dimension=self.dimension, tables=self.tables, features=self.features, tasks=self.tasks, user=self.user, item=self.item,
            overarch=self.overarch, vectors=self.vectors, several=tuple(queries), merge=merge,
        )  # fmt: skip

    def write(
        self, folder: pathlib.Path, spec: Mapping[str, Any], items: Sequence[Mapping[str, Any]] | None, samples: Sequence[Mapping[str, Any]]
    ) -> None:
        from safetensors.torch import save_file

        from .graphs import save

        for graph in self.graphs():
            save(graph.model, folder / graph.file)
        if self.tables:
            ids = {f"ids.{name}": table.ids for name, table in self.tables.items() if table.ids is not None}
            save_file({name: table.weight for name, table in self.tables.items()} | ids, folder / "tables.safetensors")
            (folder / "tables.safetensors").chmod(0o644)
        for name, table in self.tables.items():
            if "/" in name or "\\" in name or name.startswith("."):
                raise ExportError(f"table `{name}`: expected a valid file name")
            if table.vocabulary is not None:
                (folder / f"{name}.txt").write_text("".join(f"{value}\n" for value in table.vocabulary), encoding="utf-8", newline="\n")
            if table.tokenizer is not None:
                (folder / f"{name}.tokenizer.json").write_text(table.tokenizer, encoding="utf-8", newline="\n")
        if items is not None:
            (folder / "items.jsonl").write_text("".join(item_line(row) + "\n" for row in items), encoding="utf-8")
        if self.user is not None and len(samples) >= SAMPLES_MIN:
            (folder / "queries.jsonl").write_text("".join(query_line(sample) + "\n" for sample in samples), encoding="utf-8")
        written = json.dumps(sorted(["model.toml", *(file.name for file in folder.iterdir())]))
        (folder / "model.toml").write_text(_WRITTEN + _FILES + written + "\n" + toml.written(spec), encoding="utf-8")


_LEAD = {"user": ("Q",), "item": ("N",), "overarch": ("Q", "K0")}


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in tree.items()}
    return {key: value for key, value in kept.items() if value not in ([], {}, "")}


def item_line(row: Mapping[str, Any]) -> str:
    """Formats an item as a line of an item file (``docs/guide/items.md``).

    >>> item_line({"id": 7, "embedding": [0.5, 1.0], "brand": "acme"})
    '{"id":7,"embedding":[0.5,1.0],"attributes":{"brand":"acme"}}'
    >>> item_line({"id": 8, "price": float("nan"), "brand": None})
    '{"id":8,"attributes":{}}'
    """
    if "id" not in row:
        raise ExportError(f"item {dict(row)!r}: no `id`")
    line: dict[str, Any] = {"id": row["id"]} | ({"embedding": row["embedding"]} if "embedding" in row else {})
    line["attributes"] = {key: value for key, value in row.items() if key not in ("id", "embedding") and not is_missing(value)}
    return _line(f"item {row['id']}", line)


def query_line(sample: Mapping[str, Any]) -> str:
    """Formats the features of a user as a line of ``queries.jsonl``: the body of a ``:retrieve``.

    >>> query_line({"viewed": [3, 5], "age": float("nan")})
    '{"features":{"viewed":[3,5]}}'
    """
    return _line(f"sample {dict(sample)!r:.200}", {"features": {name: values for name, values in sample.items() if not is_missing(values)}})


def _line(place: str, line: Mapping[str, Any]) -> str:
    try:
        return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_plain)
    except ExportError as e:
        raise ExportError(f"{place}: {e}") from e
    except ValueError:
        raise ExportError(f"{place}: holds a number that is not finite") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise ExportError(f"holds {value!r}, expected numbers, texts and lists of them")
