"""Exports a PyTorch module to an ONNX graph that the server runs, and verifies it.

The graph comes from ``torch.export`` and PyTorch's dynamo ONNX exporter at opset 18, the lowest that it writes without
conversion. File names and lines of the exporting program, which PyTorch leaves in a graph, are removed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
import logging
import math
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ExportError

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 18
# Sizes that no width has by chance, so that an equal dimension must be the axis itself.
EXAMPLE = {"Q": 5, "N": 5, "K0": 11}
# Sizes of one, odd sizes, and more than one block of candidates.
SIZES = ({"Q": 1, "N": 1, "K0": 1}, {"Q": 1, "N": 3, "K0": 127}, {"Q": 7, "N": 64, "K0": 2})
# Maximal number of sequence lengths that are tested; for longer sequences, this number of evenly spread lengths.
LENGTHS_MAX = 64
# Seed of the inputs for the comparison with ONNX Runtime.
_SEED = 2
# One of this number of rows leaves a feature out.
MISSING_EVERY = 7


@dataclass(frozen=True)
class Port:
    """An input: its name and its shape, in which ``Q``, ``N`` and ``K0`` stand for axes of any size.

    A mask ``NAME_mask`` holds ones up to the last value of the sequence NAME and zeros after it. Rows of a sequence
    (``is_sequence``) are zeros after its last value. An input that ``may_be_missing`` is zeros if a request leaves the feature
    out. ``seen`` ``[n, ...]`` holds allowed values of the last axes; without it, any value is allowed.
    """

    name: str
    shape: tuple[str | int, ...]
    is_mask: bool = False
    seen: torch.Tensor | None = field(default=None, repr=False, compare=False)
    is_sequence: bool = False
    may_be_missing: bool = False

    def at(self, sizes: Mapping[str, int]) -> list[int]:
        """Returns the shape at these sizes."""
        return [sizes[axis] if isinstance(axis, str) else axis for axis in self.shape]

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
        """Returns random values, drawn from ``seen`` if it is set."""
        import torch

        shape = self.at(sizes)
        if self.seen is not None:
            lead = shape[: len(shape) - self.seen.dim() + 1]
            return self.seen[torch.randint(0, len(self.seen), lead, generator=generator)]
        return torch.randn(shape, generator=generator)


class Examples:
    """Example inputs of a graph: sequences of every length, including 0, and missing features.

    The first row of the first call has no values: a user without features.
    """

    def __init__(self, inputs: Sequence[Port], generator: torch.Generator):
        import torch

        self.inputs, self.generator = inputs, generator
        masks = {port.name.removesuffix("_mask"): port.shape for port in inputs if port.is_mask}
        rows = {port.name: port.shape[:-1] for port in inputs if port.is_sequence}
        #: Axes of each sequence, the last of which is its length.
        self.sequences = rows | masks
        self.lengths: dict[str, torch.Tensor] = {}
        for name, shape in self.sequences.items():
            length = int(shape[-1])
            lengths = torch.linspace(0, length, min(length + 1, LENGTHS_MAX)).round().long()
            order = torch.randperm(len(lengths) - 1, generator=generator) + 1
            self.lengths[name] = torch.cat([lengths[:1], lengths[order]])
        self.drawn: dict[str, int] = {}

    def at(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Returns inputs of these sizes; every call continues with the lengths after those of the last one."""
        import torch

        masks = {}
        for name, shape in self.sequences.items():
            lead = Port(name, shape[:-1]).at(sizes)
            lengths = self.lengths[name][self._turn(name, lead) % len(self.lengths[name])]
            masks[name] = (torch.arange(int(shape[-1])) < lengths.unsqueeze(-1)).float()
        made = []
        for port in self.inputs:
            value = port.example(sizes, self.generator)
            if port.is_mask:
                value = masks[port.name.removesuffix("_mask")]
            elif port.name in masks:
                value = value * masks[port.name].unsqueeze(-1)
            elif port.may_be_missing:
                lead = value.shape[:-1]
                value = value * (self._turn(port.name, lead) % MISSING_EVERY > 0).unsqueeze(-1)
            made.append(value)
        return made

    def _turn(self, name: str, lead: Sequence[int]) -> torch.Tensor:
        """Returns the running number of each row of a feature."""
        import torch

        first = self.drawn.get(name, 0)
        count = math.prod(lead)
        self.drawn[name] = first + count
        return torch.arange(first, first + count).reshape(tuple(lead))

    def are_left(self) -> bool:
        """Returns whether a length of a sequence was not tested yet."""
        return any(self.drawn.get(name, 0) < len(lengths) for name, lengths in self.lengths.items())


@dataclass(frozen=True)
class Graph:
    """An exported graph: its module, inputs, and outputs with their shapes after the dynamic axes."""

    file: str
    module: torch.nn.Module
    inputs: tuple[Port, ...]
    outputs: dict[str, tuple[str | int, ...]]
    model: onnx.ModelProto
    difference: float | None
    """Largest difference between the module and ONNX Runtime over several sizes, relative to the larger of 1 and the value;
    None if that is not installed."""

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the outputs of the module by name."""
        import torch

        with torch.no_grad(), _plain_attention():
            return named(self.file, self.module(*(inputs[port.name] for port in self.inputs)), next(iter(self.outputs)))

    def differs_for(self) -> str:
        """Describes the inputs at which the exported graph and the module differ most."""
        import torch

        rows = ((off, _shown_row(self.inputs, examples, row))
                for examples, offs in _compared(self.file, self, torch.Generator().manual_seed(_SEED)) for row, off in enumerate(offs))  # fmt: skip
        return max(rows, key=lambda row: row[0])[1]


def parameters(place: str, module: Any) -> list[str] | None:
    """Returns the names of a module's inputs; None if it takes any number of them by position."""
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"{place}: got {type(module).__name__}, expected a torch.nn.Module")
    found = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found):
        raise ExportError(f"{place}: forward takes **{found[-1].name}, expected one parameter for each input")
    return [p.name for p in found]


def named(place: str, made: Any, first: str) -> dict[str, torch.Tensor]:
    """Returns the outputs of a module by name; a single tensor is the output ``first``."""
    import torch

    if isinstance(made, torch.Tensor):
        made = {first: made}
    if not isinstance(made, Mapping) or not all(isinstance(value, torch.Tensor) for value in made.values()):
        raise ExportError(f"{place}: returned {type(made).__name__}, expected a tensor or a mapping of names to tensors")
    if first not in made:
        raise ExportError(f"{place}: returned {', '.join(made)}, expected `{first}` among them")
    return {first: made[first], **{name: value for name, value in made.items() if name != first}}


def export_graph(place: str, module: torch.nn.Module, inputs: Sequence[Port], first: str, lead: Sequence[str]) -> Graph:
    """Exports a module whose output ``first`` starts with the axes ``lead``, and compares module and graph.

    Raises `ExportError` if the module cannot be exported, fixes an axis, computes in a type other than f32, or returns values
    that are not finite.
    """
    import torch

    module = _prepared(place, module)
    wrapper = _positional(place, module, [port.name for port in inputs], first)
    generator = torch.Generator().manual_seed(1)
    examples = Examples(inputs, generator).at(EXAMPLE)
    made = _run(place, wrapper, inputs, examples)
    outputs = _checked_outputs(place, made, first, lead)
    twice = [port.name for port in inputs if port.name in outputs]
    if twice:
        raise ExportError(
            f"{place}: `{twice[0]}` is an input and an output, expected one meaning: give the feature another name, "
            f'as in Ids("{twice[0]}_ids", ..., column="{twice[0]}")'
        )
    _finite(place, made, inputs, examples)
    proto = _cleaned(place, _export(place, wrapper, inputs, examples, list(outputs)))
    graph = Graph(f"{place}.onnx", wrapper, tuple(inputs), outputs, proto, None)
    return replace(graph, difference=_difference(place, graph, torch.Generator().manual_seed(_SEED)))


def _prepared(place: str, module: torch.nn.Module) -> torch.nn.Module:
    import torch

    module = copy.deepcopy(module).cpu().eval()
    for name, part in module.named_modules():
        if any(hasattr(part, configs) for configs in ("embedding_bag_configs", "embedding_configs")):
            raise ExportError(
                f"{place}: `{name}` is a {type(part).__name__}; lookups stand outside the graph: "
                "give it as `tables`, and let forward take what it looks up"
            )
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ExportError(f"{place}: `{name}` is {str(tensor.dtype).removeprefix('torch.')}, expected float32: call .float()")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ExportError(f"{place}: `{name}` holds a number that is not finite")
    return module


def _positional(place: str, module: torch.nn.Module, names: list[str], first: str) -> torch.nn.Module:
    import torch

    by_name = parameters(place, module) is not None

    class Positional(torch.nn.Module):
        """The module with positional inputs and outputs by name."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            made = self.module(**dict(zip(names, inputs))) if by_name else self.module(*inputs)
            return named(place, made, first)

    return Positional().eval()


def _shown(inputs: Sequence[Port], examples: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{port.name} {list(example.shape)}" for port, example in zip(inputs, examples))


def _run(place: str, wrapper: torch.nn.Module, inputs: Sequence[Port], examples: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch

    try:
        with torch.no_grad(), _plain_attention():
            return wrapper(*examples)
    except ExportError:
        raise
    except Exception as e:
        raise ExportError(f"{place}: forward failed on {_shown(inputs, examples)}: {e}") from e


def _checked_outputs(
    place: str, made: Mapping[str, torch.Tensor], first: str, lead: Sequence[str]
) -> dict[str, tuple[str | int, ...]]:
    import torch

    outputs: dict[str, tuple[str | int, ...]] = {}
    for name, value in made.items():
        axes = list(lead) if name == first else list(lead[:1])
        expected = [EXAMPLE[axis] for axis in axes]
        if list(value.shape[: len(axes)]) != expected or value.dim() == len(axes):
            raise ExportError(f"{place}: output `{name}` has shape {list(value.shape)}, expected {expected} and more: [{', '.join(axes)}, ...]")
        if value.dtype != torch.float32:
            raise ExportError(f"{place}: output `{name}` is {str(value.dtype).removeprefix('torch.')}, expected float32")
        outputs[name] = (*axes, *value.shape[len(axes) :])
    return outputs


def _finite(place: str, made: Mapping[str, torch.Tensor], inputs: Sequence[Port], examples: Sequence[torch.Tensor]) -> None:
    """Rejects outputs that are not finite, and names the row of the inputs that causes them."""
    import torch

    for name, value in made.items():
        is_finite = torch.isfinite(value).flatten(1).all(1)
        if not is_finite.all():
            row = _shown_row(inputs, examples, int((~is_finite).nonzero()[-1]))
            advice = (
                "mask with a large finite negative number, not with -inf or a boolean mask in a softmax, and divide by at least a small number"
                if "nothing" in row
                else "samples and items, where given, are what numbers are taken from"
            )
            raise ExportError(f"{place}: output `{name}` is not finite for random inputs, {row}; {advice}")


def _shown_row(inputs: Sequence[Port], examples: Sequence[torch.Tensor], row: int) -> str:
    """Describes a row of the inputs: "`history` of 3 values, `age` of nothing"."""
    said = []
    for port, example in zip(inputs, examples):
        own = example[row]
        if port.is_mask and own.dim() == 1:
            said.append(f"`{port.name.removesuffix('_mask')}` of {int(own.sum()) or 'nothing'}")
        elif (port.is_sequence or port.may_be_missing) and not own.any():
            said.append(f"`{port.name}` of nothing")
    return "with " + ", ".join(dict.fromkeys(said)) if said else "with all features"


@contextlib.contextmanager
def _plain_attention() -> Iterator[None]:
    """Runs modules as in training: PyTorch's fast path of transformer layers at inference computes NaN for a sequence that is
    masked completely; ``scaled_dot_product_attention`` computes 0."""
    import torch

    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the progress messages of PyTorch's exporter."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _export(
    place: str, wrapper: torch.nn.Module, inputs: Sequence[Port], examples: list[torch.Tensor], outputs: list[str]
) -> onnx.ModelProto:
    import torch

    # Without a bound, PyTorch 2.7 assumes that slices exclude the largest integer, and rejects the axis for that.
    dims = {name: torch.export.Dim(name, max=2**31 - 1) for name in EXAMPLE}
    dynamic = tuple({n: dims[axis] for n, axis in enumerate(port.shape) if isinstance(axis, str)} for port in inputs)
    # The exporter chooses the names of a graph's values: an input `cat` would collide with the value of an operator of that name.
    inputs_named = [f"sterling.input.{n}" for n in range(len(inputs))]
    outputs_named = [f"sterling.output.{n}" for n in range(len(outputs))]
    attention = {torch.ops.aten.scaled_dot_product_attention.default: _attention}
    try:
        with _quiet(), _plain_attention():
            program = torch.export.export(wrapper, tuple(examples), dynamic_shapes=(dynamic,), strict=False)
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False, input_names=inputs_named, output_names=outputs_named,
                custom_translation_table=attention,
            )  # fmt: skip
        proto = exported.model_proto
    except Exception as e:
        said = str(e)
        for axis, size in EXAMPLE.items():
            if f"Constraints violated ({axis}" in said or f"specialized it to be a constant ({size})" in said:
                raise ExportError(
                    f"{place}: forward fixes the axis {axis} (to the {size} of the example inputs); take sizes from the inputs, "
                    f"as in x.reshape(x.shape[0], -1):\n{said}"
                ) from e
        raise ExportError(f"{place}: PyTorch cannot export it: {type(e).__name__}: {said}") from e
    final = dict(zip(inputs_named, (port.name for port in inputs))) | dict(zip(outputs_named, outputs))
    _rename(proto, final)
    read = {name for node in proto.graph.node for name in node.input} | {value.name for value in proto.graph.output}
    unread = [port.name for port in inputs if port.name not in read]
    if unread:
        raise ExportError(f"{place}: forward does not read {', '.join(unread)}; leave it out of its parameters and of the features")
    return proto


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *others: Any, **named: Any) -> Any:
    """Computes attention as PyTorch does if a mask leaves nothing: 0.

    The translation of onnxscript gives the mean of all values for a boolean mask and NaN for a mask of -inf.
    """
    from onnxscript import ir
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    if attn_mask is None:
        return aten_scaled_dot_product_attention(query, key, value, None, *others, **named)
    if attn_mask.dtype == ir.DataType.BOOL:
        is_allowed = attn_mask
    else:
        lowest = op.Constant(value=ir.tensor(attn_mask.dtype.min, dtype=attn_mask.dtype))
        is_allowed = op.GreaterOrEqual(attn_mask, lowest)
        attn_mask = op.Max(attn_mask, lowest)
    found = aten_scaled_dot_product_attention(query, key, value, attn_mask, *others, **named)
    is_any = op.ReduceMax(op.Cast(is_allowed, to=ir.DataType.FLOAT.value), op.Constant(value_ints=[-1]), keepdims=1)
    return op.Mul(found, is_any)


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Renames values of a graph; values that already have one of the new names are renamed as well."""
    graphs = list(_with_inner(proto.graph))
    used = {name for graph in graphs for node in graph.node for name in (*node.input, *node.output)}
    used |= {tensor.name for graph in graphs for tensor in graph.initializer}
    names = dict(names)
    for taken in used & set(names.values()):
        names[taken] = next(free for n in itertools.count() if (free := f"{taken}.{n}") not in used)
    for graph in graphs:
        for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
            value.name = names.get(value.name, value.name)
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(name, name) for name in values]


def _with_inner(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yields a graph and the subgraphs within its nodes."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _with_inner(inner)


def _cleaned(place: str, proto: onnx.ModelProto) -> onnx.ModelProto:
    import onnx

    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    graph = proto.graph
    for node in graph.node:
        if node.domain not in ("", "ai.onnx"):
            raise ExportError(f"{place}: operator `{node.domain}.{node.op_type}`, which is not of the ONNX standard")
        node.ClearField("metadata_props")
        node.ClearField("doc_string")
        node.ClearField("name")
    for value in (*graph.input, *graph.output):
        value.ClearField("metadata_props")
        if value.type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
            kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
            raise ExportError(f"{place}: `{value.name}` is {kind}, expected float32")
    for value in (*graph.value_info, *graph.initializer):
        kind = value.data_type if hasattr(value, "data_type") else value.type.tensor_type.elem_type
        if kind in (onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16):
            kind = onnx.TensorProto.DataType.Name(kind)
            raise ExportError(f"{place}: `{value.name}` is computed in {kind}, expected float32")
    graph.ClearField("value_info")
    graph.ClearField("metadata_props")
    graph.ClearField("doc_string")
    for initial in graph.initializer:
        initial.ClearField("metadata_props")
        initial.ClearField("doc_string")
    proto.ClearField("metadata_props")
    proto.ClearField("doc_string")
    graph.name = place
    _plain_shapes(proto)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except Exception as e:
        raise ExportError(f"{place}: the exported graph is not valid ONNX: {e}") from e
    return proto


def _plain_shapes(proto: onnx.ModelProto) -> None:
    """Removes `allowzero` from constant shapes without a 0, where it has no effect."""
    import onnx

    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Reshape" and node.input[1] in constants and 0 not in onnx.numpy_helper.to_array(constants[node.input[1]]):
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            node.ClearField("attribute")
            node.attribute.extend(kept)


def _difference(place: str, graph: Graph, generator: torch.Generator) -> float | None:
    """Returns the largest difference; infinite if either side is NaN."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        return None
    return max(float(offs.max(initial=0)) for _, offs in _compared(place, graph, generator))


def _compared(place: str, graph: Graph, generator: torch.Generator) -> Iterator[tuple[list[torch.Tensor], np.ndarray]]:
    """Runs the module and the exported graph at several sizes; yields the inputs of each run and the largest difference of
    each row."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise ExportError(f"{place}: ONNX Runtime cannot load the exported graph: {e}") from e
    examples_of = Examples(graph.inputs, generator)
    sizes = iter(SIZES)
    while (size := next(sizes, None)) or examples_of.are_left():
        examples = examples_of.at(size or SIZES[-1])
        wanted = _run(place, graph.module, graph.inputs, examples)
        _finite(place, wanted, graph.inputs, examples)
        try:
            found = session.run(list(wanted), {port.name: x.numpy() for port, x in zip(graph.inputs, examples)})
        except Exception as e:
            raise ExportError(f"{place}: the exported graph fails on {_shown(graph.inputs, examples)}: {e}") from e
        offs = []
        for (name, value), got in zip(wanted.items(), found):
            if list(value.shape) != list(got.shape):
                raise ExportError(f"{place}: `{name}` is {list(got.shape)} in the exported graph, {list(value.shape)} in PyTorch")
            wanted_values = value.numpy()
            off = np.nan_to_num(abs(wanted_values - got) / abs(wanted_values).clip(min=1), nan=np.inf)
            offs.append(off.reshape(len(off), -1).max(1, initial=0))
        yield examples, np.max(offs, 0)


def save(model: onnx.ModelProto, path: pathlib.Path) -> None:
    """Writes a graph with its weights inside the file."""
    path.write_bytes(model.SerializeToString(deterministic=True))
