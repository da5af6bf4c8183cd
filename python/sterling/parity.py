"""Asking a server what PyTorch was asked."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import ExportError
from .program import publish, serve
from .reference import Reference

_RECIPE = "[index]\nrescore = \"f32\"\n"


def readable(reference: Reference, samples: Sequence[Mapping[str, Any]]) -> None:
    """Refuses samples that bring what no feature reads."""
    known = sorted({feature.source for feature in reference.features.get("user", ())})
    for sample in samples:
        for name in sample:
            if name not in known:
                raise ExportError(f"samples: `{name}` is no feature of the user, expected some of: {', '.join(known)}")


def served(
    reference: Reference,
    package: pathlib.Path,
    samples: Sequence[Mapping[str, Any]],
    items: Sequence[Mapping[str, Any]],
    program: pathlib.Path,
) -> float:
    """Publishes and serves the package, asks for every sample and all items, and returns the largest difference to PyTorch of
    queries, similarities and task scores, relative to the larger of 1 and the value."""
    with tempfile.TemporaryDirectory(prefix="sterling-") as folder:
        recipe = pathlib.Path(folder) / "recipe.toml"
        recipe.write_text(_RECIPE)
        published = publish(package, pathlib.Path(folder) / "store", index=recipe, program=program)
        with serve(pathlib.Path(folder) / "store", program=program) as server:
            call = f"/v1/models/{published.name}"
            return max(_of_sample(reference, server, call, sample, items) for sample in samples)


def _of_sample(reference: Reference, server: Any, call: str, sample: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> float:
    features = {name: values.tolist() if isinstance(values, np.ndarray) else values for name, values in sample.items()}
    embedding = server.post(f"{call}:embed", {"features": features})["embedding"]
    largest = difference(np.ravel(embedding), np.ravel(reference.queries([sample])))
    count = min(len(items), 100_000)
    request = {"features": features, "k": count, "candidates": count, "exact": True, "timeout_ms": 60_000}
    answer = server.post(f"{call}:retrieve", request)["items"]
    rows = {row["id"]: row for row in items}
    wanted = reference.scores(sample, [rows[found["id"]] for found in answer])
    if len(answer) != count:
        raise ExportError(f"served: {len(answer)} items, expected {count}")
    largest = max(largest, difference([found["similarity"] for found in answer], wanted["similarity"]))
    for task in reference.tasks:
        largest = max(largest, difference([found["tasks"][task] for found in answer], wanted[task]))
    return largest


def difference(found: Any, wanted: Any) -> float:
    """The largest difference, relative to the larger of 1 and what is wanted.

    >>> difference([1.0, 110.0], [0.5, 100.0])
    0.5
    """
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        raise ExportError(f"served: shape {list(found.shape)}, expected {list(wanted.shape)}")
    return float(np.max(np.abs(found - wanted) / np.maximum(1, np.abs(wanted)), initial=0))
