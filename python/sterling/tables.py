"""Embedding tables: converts modules of PyTorch and TorchRec to `Table`."""

from __future__ import annotations

import copy
import pathlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import ExportError
from .features import one_of
from .managed import checked, is_managed, with_ids

if TYPE_CHECKING:
    import torch

_STORAGE = ("f32", "f16", "bf16")
# Sizes (numbers of ids) of the bags on which a module is compared with the computation of a server.
_BAGS = (0, 1, 2, 7)
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Table:
    """An embedding table and its use.

    ``weight`` is ``[rows, width]``: a tensor, an array, an ``nn.Embedding`` or an ``nn.EmbeddingBag``. ``vocabulary`` holds the
    value of each row, for `Category` features. ``tokenizer`` is the tokenizer of `Text` features, whose ids are rows: a path of a
    ``tokenizer.json``, its content, a ``tokenizers.Tokenizer`` or a fast tokenizer of ``transformers``. ``unseen`` is the
    treatment of ids outside the table: ``zero``, ``hash`` or ``row:N``. ``ids`` is the id of each row, ``[rows]``, if ids are
    not row numbers; a free row has ``-2**63``. ``storage`` (``f32``, ``f16``, ``bf16``) is the written type, by default the type of the weight. ``pooling`` (``sum``,
    ``mean``) applies to features that do not set it; an ``nn.EmbeddingBag`` has a pooling of its own.
    """

    weight: Any
    vocabulary: Sequence[str] | None = None
    unseen: str = "zero"
    storage: str | None = None
    pooling: str | None = None
    ids: Any = None
    features: tuple[str, ...] = ()
    """Names of the features that a TorchRec collection looks up in this table."""
    module: Any = field(default=None, repr=False, compare=False)
    """Copy of the module that looks up and pools in PyTorch; None for a plain weight."""
    tokenizer: Any = None

    @property
    def is_weighted(self) -> bool:
        """Whether weights of ids multiply rows; false for a TorchRec collection without ``is_weighted``, which drops the weights."""
        return not hasattr(self.module, "is_weighted") or bool(self.module.is_weighted())


def collect(tables: Any) -> dict[str, Table]:
    """Returns tables by name, with their weights as tensors on the CPU.

    ``tables`` is a mapping from names to the types of `Table.weight` (or to a `Table`), a TorchRec ``EmbeddingBagCollection`` or
    ``EmbeddingCollection``, one of these with managed collisions, a module that holds collections, such as ``DLRM``, or a list
    of these.
    """
    found: dict[str, Table] = {}
    originals: dict[str, Any] = {}
    for name, table in _each(tables):
        if name in found:
            raise ExportError(f"table `{name}` is given twice")
        found[name] = _opened(name, table)
        originals[name] = table.weight
    # Makes one copy of a collection for all of its tables, which uses the written weights.
    memo: dict[int, Any] = {id(originals[name]): _parameter(table.weight) for name, table in found.items() if is_collection(table.module)}
    for name, table in found.items():
        if is_collection(table.module):
            found[name] = replace(table, module=copy.deepcopy(table.module, memo).cpu().eval())
    return found


def is_collection(module: Any) -> bool:
    """Returns whether a module is a TorchRec collection of embedding tables."""
    return any(hasattr(module, configs) for configs in ("embedding_bag_configs", "embedding_configs"))


def _parameter(weight: torch.Tensor) -> torch.nn.Parameter:
    import torch

    return torch.nn.Parameter(weight.float(), requires_grad=False)


_OTHERWISE = "to use both, give the bag's weight as a table of its own"


def _each(tables: Any) -> Iterable[tuple[str, Table]]:
    if tables is None:
        return
    if isinstance(tables, Mapping):
        for name, table in tables.items():
            yield name, table if isinstance(table, Table) else Table(table)
    elif is_managed(tables):
        yield from with_ids(tables, _each(tables._embedding_module))
    elif hasattr(tables, "embedding_bag_configs"):
        yield from _of_collection(tables.embedding_bag_configs(), getattr(tables, "embedding_bags", None), tables)
    elif hasattr(tables, "embedding_configs"):
        yield from _of_collection(tables.embedding_configs(), getattr(tables, "embeddings", None), tables)
    elif isinstance(tables, (list, tuple)):
        for one in tables:
            yield from _each(one)
    elif collections := _collections_in(tables):
        yield from _each(collections)
    else:
        raise ExportError(
            f"tables: got {type(tables).__name__}, expected a mapping of names to nn.Embedding, nn.EmbeddingBag or tensors, "
            "an EmbeddingBagCollection, an EmbeddingCollection, or a list of these"
        )


def _collections_in(module: Any) -> list[Any]:
    """Returns the TorchRec collections that a module such as ``SparseArch`` or ``DLRM`` holds. Rejects TorchRec's own wrappers of a
    collection, which process its features or remap its ids."""
    found = []
    for part in module.children() if hasattr(module, "children") else ():
        found += [part] if is_collection(part) else _collections_in(part)
    if found and type(module).__module__.startswith("torchrec.modules."):
        raise ExportError(
            f"tables: a {type(module).__name__} changes what its {type(found[0]).__name__} looks up, which a server does not; "
            "give the collection itself, and compute the rest in forward"
        )
    return found


def _of_collection(configs: Any, modules: Any, collection: Any) -> Iterable[tuple[str, Table]]:
    kind = type(collection).__name__
    for config in configs:
        module = modules[config.name] if modules is not None and config.name in modules else None
        if not hasattr(module, "weight"):
            raise ExportError(f"table `{config.name}`: {kind} holds no float weight of this table; export the module before it is sharded or quantised")
        if getattr(config, "num_embeddings_post_pruning", None) is not None:
            raise ExportError(f"table `{config.name}`: the table is pruned, expected a table with all its rows")
        if getattr(config, "use_virtual_table", False):
            raise ExportError(f"table `{config.name}`: the table is virtual, expected rows 0 to num_embeddings")
        pooling = getattr(config, "pooling", None)
        if pooling is not None:
            pooling = one_of(f"table `{config.name}`: pooling", pooling.value.lower(), ("sum", "mean"))
        yield config.name, Table(module.weight, pooling=pooling, features=tuple(config.feature_names), module=collection)


def _opened(name: str, table: Table) -> Table:
    import torch

    weight, pooling, place = table.weight, table.pooling, f"table `{name}`"
    padding = module = None
    if pooling is not None:
        one_of(f"{place}: pooling", pooling, ("sum", "mean"))
    if isinstance(weight, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
        module = weight
        if module.max_norm is not None:
            raise ExportError(f"{place}: max_norm {module.max_norm}, which changes rows as they are looked up; renormalise the weight and leave max_norm out")
        padding = module.padding_idx
        if isinstance(module, torch.nn.EmbeddingBag):
            mode = one_of(f"{place}: mode", module.mode, ("sum", "mean"))
            if pooling not in (None, mode):
                raise ExportError(f"{place}: pooling `{pooling}` of an nn.EmbeddingBag with mode `{mode}`; {_OTHERWISE}")
            pooling = mode
            if padding is not None and pooling == "mean":
                raise ExportError(f"{place}: padding_idx {padding} with mode `mean`, which would count it; leave padding out of the ids")
        weight = module.weight
    elif isinstance(weight, torch.nn.Module):
        raise ExportError(f"{place}: got {type(weight).__name__}, expected nn.Embedding, nn.EmbeddingBag, a tensor or an array")
    try:
        weight = torch.as_tensor(weight)
    except (TypeError, ValueError, RuntimeError) as e:
        raise ExportError(f"{place}: {type(weight).__name__} is no tensor: {e}") from e
    if weight.is_meta:
        raise ExportError(f"{place}: weight is on the device `meta`, which holds no numbers; load the module's weights to the CPU before")
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
    if padding is not None and stored[padding].any():
        # A server has no padding index: requests contain values only, and a sequence is padded with zeros after its values.
        is_bag = isinstance(module, torch.nn.EmbeddingBag)
        becomes = "is written as zeros, as the bag leaves it out" if is_bag else "is looked up where a request sends this id, and padding is zeros instead"
        warnings.warn(f"{place}: the row of padding_idx {padding} is not zero: it {becomes}; set it to zero before training", stacklevel=2)
    if padding is not None and isinstance(module, torch.nn.EmbeddingBag):
        stored[padding] = 0
    if module is not None:
        module = copy.deepcopy(module, {id(module.weight): _parameter(stored)}).cpu().eval()
    vocabulary = _vocabulary(place, table.vocabulary, len(weight))
    ids = checked(place, table.ids, table, len(weight))
    tokenizer = None if table.tokenizer is None else _tokenizer(place, table.tokenizer)
    return replace(
        table, weight=stored, vocabulary=vocabulary, ids=ids, tokenizer=tokenizer, storage=storage, pooling=pooling, module=module or table.module
    )


def rows_of(name: str, table: Table, ids: Sequence[int]) -> torch.Tensor:
    """Returns the rows of ids ``[n, width]``, as the module looks them up."""
    import torch

    module, at = table.module, torch.tensor(ids, dtype=torch.int64)
    if isinstance(module, torch.nn.Embedding) or hasattr(module, "embedding_configs"):
        with torch.no_grad():
            return module(at) if isinstance(module, torch.nn.Embedding) else _of_feature(name, table, ids, None).values()
    return table.weight[at].float()


def pooled(name: str, table: Table, pooling: str, ids: Sequence[int], weights: Sequence[float] | None) -> torch.Tensor:
    """Returns the rows of ids pooled to one vector ``[width]``, as the module pools them.

    An unsharded TorchRec collection has no weighted mean. FBGEMM computes that mean as the sum of weighted rows divided by the number of ids.
    """
    import torch

    module = table.module
    is_bag, is_collection = isinstance(module, torch.nn.EmbeddingBag), hasattr(module, "embedding_bag_configs")
    if (is_bag or is_collection) and pooling == table.pooling and not (is_collection and table.is_weighted and pooling == "mean"):
        try:
            with torch.no_grad():
                if is_collection:
                    return _of_feature(name, table, ids, weights)[0]
                offsets = torch.tensor([0, len(ids)] if module.include_last_offset else [0])
                by = None if weights is None else torch.tensor(weights, dtype=torch.float32)
                return module(torch.tensor(ids, dtype=torch.int64), offsets, per_sample_weights=by)[0]
        except Exception as e:
            given = f"ids {list(ids)[:8]}" + ("" if weights is None else f" with weights {list(weights)[:8]}")
            raise ExportError(f"table `{name}`: {type(module).__name__} fails on {given}: {e}") from e
    return _plainly(rows_of(name, table, ids), pooling, weights)


def _plainly(rows: torch.Tensor, pooling: str, weights: Sequence[float] | None) -> torch.Tensor:
    """Pools rows as a server does."""
    import torch

    if weights is not None:
        rows = rows * torch.tensor(weights, dtype=torch.float32).unsqueeze(1)
    return rows.sum(0) / (max(1, len(rows)) if pooling == "mean" else 1)


def _of_feature(name: str, table: Table, ids: Sequence[int], weights: Sequence[float] | None) -> Any:
    """Returns the output of a TorchRec collection for the first feature of a table."""
    import torch
    from torchrec import KeyedJaggedTensor

    collection, key = table.module, table.features[0]
    of_bags = hasattr(collection, "embedding_bag_configs")
    configs = collection.embedding_bag_configs() if of_bags else collection.embedding_configs()
    keys = list(dict.fromkeys(feature for config in configs for feature in config.feature_names))
    given = weights if weights is not None else [1.0] * len(ids)
    bags = KeyedJaggedTensor.from_lengths_sync(
        keys=keys, values=torch.tensor(ids, dtype=torch.int64), lengths=torch.tensor([len(ids) if other == key else 0 for other in keys]),
        weights=torch.tensor(given, dtype=torch.float32) if of_bags else None,
    )  # fmt: skip
    made = collection(bags)
    made = made.to_dict() if of_bags else made
    # If the feature is looked up in several tables, its output is named after the table too.
    return made[key] if key in made else made[f"{key}@{name}"]


def agree(name: str, table: Table, pooling: str) -> None:
    """Rejects a module that looks up or pools differently from a server, tested on a few bags."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for count in _BAGS:
        at = torch.randint(0, len(table.weight), (count,), generator=generator)
        ids, rows = at.tolist(), table.weight[at].float()
        weights = [0.5 + n for n in range(count)] if table.is_weighted and pooling == "sum" else None
        if pooling == "none":
            found, wanted = rows, rows_of(name, table, ids)
        else:
            found, wanted = _plainly(rows, pooling, weights), pooled(name, table, pooling, ids, weights)
        difference = ((found - wanted).abs() / wanted.abs().clamp(min=1)).max().item() if found.numel() else 0.0
        if found.shape != wanted.shape or not difference <= _TOLERANCE:
            what = "rows" if pooling == "none" else f"{pooling} of rows"
            raise ExportError(
                f"table `{name}`: {type(table.module).__name__} differs by {difference:.2e} from the {what} of ids {ids} that a server computes"
            )


def _vocabulary(place: str, values: Sequence[str] | None, rows: int) -> list[str] | None:
    if values is None:
        return None
    values = [str(value) for value in values]
    if len(values) > rows:
        raise ExportError(f"{place}: vocabulary of {len(values)} values for {rows} rows, expected at most one value per row")
    if len(set(values)) != len(values):
        twice = next(value for value in values if values.count(value) > 1)
        raise ExportError(f"{place}: vocabulary holds `{twice}` twice")
    for value in values:
        if "\n" in value or value.endswith("\r"):
            raise ExportError(f"{place}: vocabulary holds {value!r}, expected values without line breaks")
    return values


def _tokenizer(place: str, given: Any) -> str:
    """Returns the text of a ``tokenizer.json``."""
    given = getattr(given, "backend_tokenizer", given)
    if hasattr(given, "to_str"):
        return given.to_str()
    try:
        text = given if isinstance(given, str) and given.lstrip().startswith("{") else pathlib.Path(given).read_text(encoding="utf-8")
    except (OSError, TypeError, UnicodeDecodeError) as e:
        raise ExportError(f"{place}: tokenizer {str(given)[:200]!r}: {e}; expected a tokenizer.json or a fast tokenizer") from None
    return text


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
