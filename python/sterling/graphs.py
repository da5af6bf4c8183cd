"""From a PyTorch module to an ONNX graph that the server runs, checked on the way.

The graph comes from ``torch.export`` and PyTorch's dynamo ONNX exporter at opset 18, the lowest that it writes by itself. Names of
files and lines of the program that exported, which PyTorch leaves in a graph, are taken out.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import pathlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import ExportError

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 18
# Sizes that no width has by chance: what is equal to one of them is the axis itself.
EXAMPLE = {"Q": 5, "N": 5, "K0": 11}
# One of each, odd ones, and more than a block of candidates.
SIZES = ({"Q": 1, "N": 1, "K0": 1}, {"Q": 1, "N": 3, "K0": 127}, {"Q": 7, "N": 64, "K0": 2})


@dataclass(frozen=True)
class Port:
    """An input: its name and its shape, in which ``Q``, ``N`` and ``K0`` stand for axes of any size. A mask holds zeros and ones; ``seen``
    ``[n, ...]`` are values of the last axes that it takes, any where there are none."""

    name: str
    shape: tuple[str | int, ...]
    is_mask: bool = False
    seen: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def at(self, sizes: Mapping[str, int]) -> list[int]:
        """The shape at these sizes."""
        return [sizes[axis] if isinstance(axis, str) else axis for axis in self.shape]

    def example(self, sizes: Mapping[str, int], generator: torch.Generator) -> torch.Tensor:
        """Random values, of those seen where there are some."""
        import torch

        shape = self.at(sizes)
        if self.seen is not None:
            lead = shape[: len(shape) - self.seen.dim() + 1]
            return self.seen[torch.randint(0, len(self.seen), lead, generator=generator)]
        values = torch.randn(shape, generator=generator)
        return (values > 0).float() if self.is_mask else values


@dataclass(frozen=True)
class Graph:
    """An exported graph: its module, inputs, and outputs with their shapes after the dynamic axes."""

    file: str
    module: torch.nn.Module
    inputs: tuple[Port, ...]
    outputs: dict[str, tuple[str | int, ...]]
    model: onnx.ModelProto
    difference: float | None
    """The largest difference to the module in ONNX Runtime over several sizes, relative to the larger of 1 and the value; None where
    that is not installed."""

    def __call__(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """The module's outputs by name."""
        import torch

        with torch.no_grad():
            return named(self.file, self.module(*(inputs[port.name] for port in self.inputs)), next(iter(self.outputs)))


def parameters(place: str, module: Any) -> list[str] | None:
    """The names of a module's inputs; None where it takes any number of them by position."""
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
    """What a module returned, by name; a tensor alone is the output that comes ``first``."""
    import torch

    if isinstance(made, torch.Tensor):
        made = {first: made}
    if not isinstance(made, Mapping) or not all(isinstance(value, torch.Tensor) for value in made.values()):
        raise ExportError(f"{place}: returned {type(made).__name__}, expected a tensor or a mapping of names to tensors")
    if first not in made:
        raise ExportError(f"{place}: returned {', '.join(made)}, expected `{first}` among them")
    return {first: made[first], **{name: value for name, value in made.items() if name != first}}


def export_graph(place: str, module: torch.nn.Module, inputs: Sequence[Port], first: str, lead: Sequence[str]) -> Graph:
    """Exports a module whose output ``first`` starts with the axes ``lead``, and runs both sides.

    Raises `ExportError` where the module cannot be exported, fixes an axis, computes in another type than f32, or makes something
    that is not finite.
    """
    import torch

    module = _prepared(place, module)
    wrapper = _positional(place, module, [port.name for port in inputs], first)
    generator = torch.Generator().manual_seed(1)
    examples = [port.example(EXAMPLE, generator) for port in inputs]
    made = _run(place, wrapper, inputs, examples)
    outputs = _checked_outputs(place, made, first, lead)
    proto = _cleaned(place, _export(place, wrapper, inputs, examples, list(outputs)))
    graph = Graph(f"{place}.onnx", wrapper, tuple(inputs), outputs, proto, None)
    return Graph(graph.file, wrapper, graph.inputs, outputs, proto, _difference(place, graph, generator))


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
        """The module with its inputs in a row and its outputs by name."""

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
        with torch.no_grad():
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
        if not torch.isfinite(value).all():
            raise ExportError(f"{place}: output `{name}` is not finite for random inputs; samples and items, where given, are what numbers are taken from")
        outputs[name] = (*axes, *value.shape[len(axes) :])
    return outputs


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes that PyTorch's exporter writes about what it does."""
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

    # Without a bound PyTorch 2.7 takes slices to rule out the largest integer, and refuses the axis for that.
    dims = {name: torch.export.Dim(name, max=2**31 - 1) for name in EXAMPLE}
    dynamic = tuple({n: dims[axis] for n, axis in enumerate(port.shape) if isinstance(axis, str)} for port in inputs)
    try:
        with _quiet():
            program = torch.export.export(wrapper, tuple(examples), dynamic_shapes=(dynamic,), strict=False)
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, verbose=False, input_names=[port.name for port in inputs], output_names=outputs
            )
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
    read = {name for node in proto.graph.node for name in node.input} | {value.name for value in proto.graph.output}
    unread = [port.name for port in inputs if port.name not in read]
    if unread:
        raise ExportError(f"{place}: forward does not read {', '.join(unread)}; leave it out of its parameters and of the features")
    return proto


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
    onnx.checker.check_model(proto, full_check=True)
    return proto


def _plain_shapes(proto: onnx.ModelProto) -> None:
    """Leaves out `allowzero` of constant shapes without a 0: it says nothing there."""
    import onnx

    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for node in proto.graph.node:
        if node.op_type == "Reshape" and node.input[1] in constants and 0 not in onnx.numpy_helper.to_array(constants[node.input[1]]):
            kept = [attribute for attribute in node.attribute if attribute.name != "allowzero"]
            node.ClearField("attribute")
            node.attribute.extend(kept)


def _difference(place: str, graph: Graph, generator: torch.Generator) -> float | None:
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as e:
        raise ExportError(f"{place}: ONNX Runtime cannot load the exported graph: {e}") from e
    largest = 0.0
    for sizes in SIZES:
        examples = [port.example(sizes, generator) for port in graph.inputs]
        wanted = _run(place, graph.module, graph.inputs, examples)
        try:
            found = session.run(list(wanted), {port.name: x.numpy() for port, x in zip(graph.inputs, examples)})
        except Exception as e:
            raise ExportError(f"{place}: the exported graph fails on {_shown(graph.inputs, examples)}: {e}") from e
        for (name, value), got in zip(wanted.items(), found):
            if list(value.shape) != list(got.shape):
                raise ExportError(f"{place}: `{name}` is {list(got.shape)} in the exported graph, {list(value.shape)} in PyTorch")
            wanted_values = value.numpy()
            off = abs(wanted_values - got) / abs(wanted_values).clip(min=1)
            largest = max(largest, float(off.max(initial=0)))
    return largest


def save(model: onnx.ModelProto, path: pathlib.Path) -> None:
    """Writes a graph with its weights inside the file."""
    path.write_bytes(model.SerializeToString(deterministic=True))
