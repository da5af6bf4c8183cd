"""Embedding tables: from PyTorch's and TorchRec's modules to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import ExportError
from .features import one_of

if TYPE_CHECKING:
    import torch

_STORAGE = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Table:
    """An embedding table and how it is used.

    ``weight`` is ``[rows, width]``: a tensor, an array, an ``nn.Embedding`` or an ``nn.EmbeddingBag``. ``vocabulary`` holds the value of
    each row, for `Category` features. ``unseen`` is what an id outside the table becomes: ``zero``, ``hash`` or ``row:N``. ``storage``
    (``f32``, ``f16``, ``bf16``) is the type that is written, the weight's own where it is not given.
    """

    weight: Any
    vocabulary: Sequence[str] | None = None
    unseen: str = "zero"
    storage: str | None = None
    pooling: str = "sum"
    features: tuple[str, ...] = ()
    """Names that a TorchRec collection feeds from this table."""


def collect(tables: Any) -> dict[str, Table]:
    """Tables by name, their weights as tensors on the CPU.

    ``tables`` is a mapping from names to what `Table.weight` may be (or to a `Table`), a TorchRec ``EmbeddingBagCollection`` or
    ``EmbeddingCollection``, or a list of such.
    """
    found: dict[str, Table] = {}
    for name, table in _each(tables):
        if name in found:
            raise ExportError(f"table `{name}` is given twice")
        found[name] = _opened(name, table)
    return found


def _each(tables: Any) -> Iterable[tuple[str, Table]]:
    if tables is None:
        return
    if isinstance(tables, Mapping):
        for name, table in tables.items():
            yield name, table if isinstance(table, Table) else Table(table)
    elif hasattr(tables, "embedding_bag_configs"):
        yield from _of_collection(tables.embedding_bag_configs(), getattr(tables, "embedding_bags", None), tables)
    elif hasattr(tables, "embedding_configs"):
        yield from _of_collection(tables.embedding_configs(), getattr(tables, "embeddings", None), tables)
    elif isinstance(tables, (list, tuple)):
        for one in tables:
            yield from _each(one)
    else:
        raise ExportError(
            f"tables: got {type(tables).__name__}, expected a mapping of names to nn.Embedding, nn.EmbeddingBag or tensors, "
            "an EmbeddingBagCollection, an EmbeddingCollection, or a list of these"
        )


def _of_collection(configs: Any, modules: Any, collection: Any) -> Iterable[tuple[str, Table]]:
    kind = type(collection).__name__
    for config in configs:
        module = modules[config.name] if modules is not None and config.name in modules else None
        if not hasattr(module, "weight"):
            raise ExportError(f"table `{config.name}`: {kind} holds no float weight of it; export the module before it is sharded or quantised")
        if getattr(config, "num_embeddings_post_pruning", None) is not None:
            raise ExportError(f"table `{config.name}`: pruned, expected a table with all its rows")
        if getattr(config, "use_virtual_table", False):
            raise ExportError(f"table `{config.name}`: virtual, expected rows 0 to num_embeddings")
        pooling = getattr(getattr(config, "pooling", None), "value", "SUM").lower()
        one_of(f"table `{config.name}`: pooling", pooling, ("sum", "mean"))
        yield config.name, Table(module.weight, pooling=pooling, features=tuple(config.feature_names))


def _opened(name: str, table: Table) -> Table:
    import torch

    weight, pooling, place = table.weight, table.pooling, f"table `{name}`"
    padding = None
    if isinstance(weight, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        module = weight
        if module.max_norm is not None:
            raise ExportError(f"{place}: max_norm {module.max_norm}, which changes rows as they are looked up; renormalise the weight and leave it out")
        if isinstance(module, torch.nn.EmbeddingBag):
            pooling = one_of(f"{place}: mode", module.mode, ("sum", "mean"))
            padding = module.padding_idx
            if padding is not None and pooling == "mean":
                raise ExportError(f"{place}: padding_idx {padding} with mode `mean`, which would count it; leave padding out of the ids")
        weight = module.weight
    elif isinstance(weight, torch.nn.Module):
        raise ExportError(f"{place}: got {type(weight).__name__}, expected nn.Embedding, nn.EmbeddingBag, a tensor or an array")
    try:
        weight = torch.as_tensor(weight)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ExportError(f"{place}: {type(weight).__name__} is no tensor: {e}") from e
    weight = weight.detach().cpu()
    if weight.dim() != 2 or 0 in weight.shape:
        raise ExportError(f"{place}: weight has shape {list(weight.shape)}, expected [rows, width]")
    types = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
    if weight.dtype not in types:
        raise ExportError(f"{place}: weight is {_dtype(weight)}, expected float32, float16 or bfloat16")
    storage = one_of(f"{place}: storage", table.storage or types[weight.dtype], _STORAGE)
    stored = weight.to(dict(zip(_STORAGE, (torch.float32, torch.float16, torch.bfloat16)))[storage]).contiguous().clone()
    if not torch.isfinite(stored).all():
        raise ExportError(f"{place}: a number is not finite in {storage}")
    if padding is not None:
        stored[padding] = 0
    return replace(table, weight=stored, vocabulary=_vocabulary(place, table.vocabulary, len(weight)), storage=storage, pooling=pooling)


def _vocabulary(place: str, values: Sequence[str] | None, rows: int) -> list[str] | None:
    if values is None:
        return None
    values = [str(value) for value in values]
    if len(values) > rows:
        raise ExportError(f"{place}: vocabulary of {len(values)} values for {rows} rows, expected at most one a row")
    if len(set(values)) != len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ExportError(f"{place}: vocabulary holds `{twice}` twice")
    for value in values:
        if "\n" in value or value.endswith("\r"):
            raise ExportError(f"{place}: vocabulary holds {value!r}, expected values of one line")
    return values


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
