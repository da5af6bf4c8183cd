"""Compares the answers of a server with results of PyTorch."""

from __future__ import annotations

import json
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import ExportError
from .exporting import query_line
from .features import LookedUp, listed
from .program import publish, serve
from .reference import Reference

#: Maximal number of samples whose answers with all items are compared.
RANKED_MAX = 32
#: Maximal number of samples whose queries are compared.
EMBEDDED_MAX = 1024
#: Maximal number of truncated histories that are compared.
SHORTENED_MAX = 64
_RECIPE = "[index]\nrescore = \"f32\"\n"


def readable(reference: Reference, samples: Sequence[Mapping[str, Any]]) -> None:
    """Rejects samples with fields that no feature reads."""
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
) -> tuple[float, Mapping[str, Any]]:
    """Publishes and serves the package, requests every sample with all items, and returns the largest difference to PyTorch of
    queries, similarities and task scores, relative to the larger of 1 and the value, with the features that cause it.

    A user without features and histories truncated at every length are requested as well. If there are many samples, only some are
    ranked with all items, and all are embedded.
    """
    with tempfile.TemporaryDirectory(prefix="sterling-") as folder:
        recipe = pathlib.Path(folder) / "recipe.toml"
        recipe.write_text(_RECIPE)
        published = publish(package, pathlib.Path(folder) / "store", index=recipe, program=program)
        with serve(pathlib.Path(folder) / "store", program=program) as server:
            call = f"/v1/models/{published.name}"
            ranked = [{}, *_spread(samples, RANKED_MAX)]
            embedded = [{}, *shortened(reference, samples), *_spread(samples, EMBEDDED_MAX)]
            found = [(_of_ranking(reference, server, call, sample, items), sample) for sample in ranked]
            found += [(_of_query(reference, server, call, sample), sample) for sample in embedded]
            return max(found, key=lambda one: one[0])


def _spread(samples: Sequence[Mapping[str, Any]], most: int) -> Sequence[Mapping[str, Any]]:
    return samples[:: max(1, -(-len(samples) // most))]


def shortened(reference: Reference, samples: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the sample with the longest history, truncated at every shorter length, per sequence feature."""
    for feature in reference.features.get("user", ()):
        if isinstance(feature, LookedUp) and feature.is_sequence and samples:
            longest = max(samples, key=lambda sample: len(listed(feature, sample)))
            values = listed(feature, longest)[: feature.length]
            for length in sorted({round(n * len(values) / SHORTENED_MAX) for n in range(SHORTENED_MAX)}):
                yield {**longest, feature.source: values[:length]}


def _of_query(reference: Reference, server: Any, call: str, sample: Mapping[str, Any]) -> float:
    embedding = server.post(f"{call}:embed", {"features": sent(sample)})["embedding"]
    return difference(np.ravel(embedding), np.ravel(reference.queries([sample])))


def _of_ranking(reference: Reference, server: Any, call: str, sample: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> float:
    count = min(len(items), 100_000)
    request = {"features": sent(sample), "k": count, "candidates": count, "exact": True, "timeout_ms": 60_000}
    answer = server.post(f"{call}:retrieve", request)["items"]
    rows = {row["id"]: row for row in items}
    wanted = reference.scores(sample, [rows[found["id"]] for found in answer])
    if len(answer) != count:
        raise ExportError(f"served: {len(answer)} items, expected {count}")
    each = [difference([found["similarity"] for found in answer], wanted["similarity"])]
    each += [difference([found["tasks"][task] for found in answer], wanted[task]) for task in reference.tasks]
    return max(each)


def sent(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the features of a sample as a request contains them."""
    return json.loads(query_line(sample))["features"]


def difference(found: Any, wanted: Any) -> float:
    """Returns the largest difference, relative to the larger of 1 and the expected value; infinite if either is NaN.

    >>> difference([1.0, 110.0], [0.5, 100.0]), difference([1.0, float("nan")], [1.0, 2.0])
    (0.5, inf)
    """
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    if found.shape != wanted.shape:
        raise ExportError(f"served: shape {list(found.shape)}, expected {list(wanted.shape)}")
    off = np.abs(found - wanted) / np.maximum(1, np.abs(wanted))
    return float(np.max(np.nan_to_num(off, nan=np.inf), initial=0))
