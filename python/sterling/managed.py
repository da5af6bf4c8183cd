"""Managed ids of tables: the id of each row, read from TorchRec's managed collision modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .errors import ExportError

if TYPE_CHECKING:
    import torch

    from .tables import Table

# Id of a free row.
FREE = -(2**63)
_LARGEST = 2**63 - 1


def is_managed(collection: Any) -> bool:
    """Returns whether a module is a ManagedCollisionEmbeddingBagCollection or a ManagedCollisionEmbeddingCollection."""
    return hasattr(collection, "_managed_collision_collection") and hasattr(collection, "_embedding_module")


def with_ids(collection: Any, tables: Iterable[tuple[str, Table]]) -> Iterator[tuple[str, Table]]:
    """Yields the tables of a managed collision collection, with the ids of their rows."""
    modules = collection._managed_collision_collection._managed_collision_modules
    for name, table in tables:
        module = modules[name]
        ids, unseen = _of_module(name, module)
        if len(ids) != len(table.weight):
            raise ExportError(f"table `{name}`: {len(table.weight)} rows, and {type(module).__name__} has {len(ids)}; expected an unsharded module")
        yield name, replace(table, ids=ids, unseen=unseen)


def _of_module(name: str, module: Any) -> tuple[torch.Tensor, str]:
    import torch

    kind = type(module).__name__
    if getattr(module, "_input_hash_func", None) is not None:
        raise ExportError(f"table `{name}`: {kind} hashes ids, which a server does not; expected input_hash_func=None")
    if hasattr(module, "_mch_sorted_raw_ids"):
        held, rows = module._mch_sorted_raw_ids.detach().cpu(), module._mch_remapped_ids_mapping.detach().cpu()
        is_held = held != _LARGEST
        ids = torch.full((len(held),), FREE, dtype=torch.int64)
        ids[rows[is_held] - module._output_global_offset] = held[is_held]
        # The last row belongs to all other ids.
        return ids, f"row:{len(held) - 1}"
    if hasattr(module, "_hash_zch_identities"):
        held = module._hash_zch_identities.detach().cpu().reshape(len(module._hash_zch_identities), -1)[:, 0].to(torch.int64)
        # An id without a row adds nothing, as with disable_fallback. The fallback would give the id the row of another id.
        return torch.where(held == -1, FREE, held), "zero"
    raise ExportError(f"table `{name}`: got {kind}, expected MCHManagedCollisionModule or HashZchManagedCollisionModule")


def checked(place: str, ids: Any, table: Table, rows: int) -> torch.Tensor | None:
    """Returns the ids of a table's rows as a tensor; None if ids are row numbers."""
    import torch

    if ids is None:
        return None
    if table.vocabulary is not None:
        raise ExportError(f"{place}: got a vocabulary and ids, expected one of them")
    if table.tokenizer is not None:
        raise ExportError(f"{place}: got a tokenizer and ids, expected one of them")
    ids = torch.as_tensor(ids).detach().cpu()
    if ids.dtype != torch.int64 or list(ids.shape) != [rows]:
        raise ExportError(f"{place}: ids are {ids.dtype} {list(ids.shape)}, expected torch.int64 [{rows}]")
    held = ids[ids != FREE]
    if len(held.unique()) != len(held):
        raise ExportError(f"{place}: an id has two rows, expected each id once")
    other = int(table.unseen.removeprefix("row:")) if table.unseen.startswith("row:") else None
    if other is not None and other < rows and ids[other] != FREE:
        raise ExportError(f"{place}: row {other} is reserved for unseen ids, expected no id, got {ids[other]}")
    return ids.contiguous().clone()
