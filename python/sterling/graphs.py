"""Exports a PyTorch module to an ONNX graph that the server runs, and verifies that graph and module compute the same for
inputs of several sizes, and for sequences of every length, zero among them."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import ExportError
from .exporters import write_graph
from .tables import is_collection

if TYPE_CHECKING:
    import onnx
    import torch

# Sizes that are unlikely as widths, so that a dimension of such a size must be the axis itself.
EXAMPLE = {"Q": 5, "N": 5, "K0": 11}
# Sizes of one, odd sizes, and more than one block of candidates.
SIZES = ({"Q": 1, "N": 1, "K0": 1}, {"Q": 1, "N": 3, "K0": 127}, {"Q": 7, "N": 64, "K0": 2})
# Maximal number of sequence lengths that are tested; for longer sequences, this number of evenly spread lengths.
LENGTHS_MAX = 64
# Seed of the inputs for the comparison with ONNX Runtime.
_SEED = 2
# One row in this many has no value for an optional feature.
MISSING_EVERY = 7


@dataclass(frozen=True)
class Port:
    """An input of a graph: its name and its shape, in which ``Q``, ``N`` and ``K0`` stand for axes of any size.

    A mask ``NAME_mask`` holds ones up to the last value of the sequence NAME and zeros after it. Rows of a sequence
    (``is_sequence``) are zeros after its last value. An input that ``may_be_missing`` is zeros if a request leaves the feature
    out. ``seen`` ``[n, ...]`` holds allowed values of the last axes; without it, any value is allowed. ``parameter`` is the name in
    the module, if it differs from ``name``.
    """

    name: str
    shape: tuple[str | int, ...]
    is_mask: bool = False
    seen: torch.Tensor | None = field(default=None, repr=False, compare=False)
    is_sequence: bool = False
    may_be_missing: bool = False
    parameter: str | None = None

    def at(self, sizes: Mapping[str, int]) -> list[int]:
        """Returns the input's shape for these axis sizes."""
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
        #: Axes of each sequence; the last axis is its length.
        self.sequences = rows | masks
        #: Lengths to test of each sequence, in a random order after 0.
        self.lengths: dict[str, torch.Tensor] = {}
        for name, shape in self.sequences.items():
            length = int(shape[-1])
            lengths = torch.linspace(0, length, min(length + 1, LENGTHS_MAX)).round().long()
            order = torch.randperm(len(lengths) - 1, generator=generator) + 1
            self.lengths[name] = torch.cat([lengths[:1], lengths[order]])
        self.drawn: dict[str, int] = {}

    def at(self, sizes: Mapping[str, int]) -> list[torch.Tensor]:
        """Returns inputs of these sizes, with the next sequence lengths to test after those of the previous call."""
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
        """Returns consecutive numbers for the rows of a feature, continued from call to call."""
        import torch

        first = self.drawn.get(name, 0)
        count = math.prod(lead)
        self.drawn[name] = first + count
        return torch.arange(first, first + count).reshape(tuple(lead))

    def are_left(self) -> bool:
        """Returns whether some length of some sequence was not tested yet."""
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
    None if ONNX Runtime is not installed."""

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


def unwrapped(module: Any) -> Any:
    """Returns the module inside the wrappers of ``torch.compile`` and of data-parallel training."""
    import torch

    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while hasattr(module, "_orig_mod") or isinstance(module, parallel):
        module = module.module if isinstance(module, parallel) else module._orig_mod
    return module


def parameters(place: str, module: Any) -> dict[str, bool] | None:
    """Returns the names of a module's inputs, and whether each may be left out; None if the module takes any number of inputs by position."""
    import torch

    if not isinstance(module, torch.nn.Module):
        raise ExportError(f"{place}: got {type(module).__name__}, expected a torch.nn.Module")
    if isinstance(module, torch.jit.ScriptModule):
        raise ExportError(f"{place}: got a {type(module).__name__} of TorchScript, expected the torch.nn.Module that it was made from")
    found = list(inspect.signature(module.forward).parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in found):
        return None
    by_name = [p for p in found if p.kind is not p.VAR_KEYWORD]
    if found and not by_name:
        raise ExportError(f"{place}: forward takes **{found[-1].name}, expected one parameter for each input")
    return {p.name: p.default is not p.empty for p in by_name}


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


def export_graph(
    place: str, module: torch.nn.Module, inputs: Sequence[Port], first: str, lead: Sequence[str], exporter: str | None = None
) -> Graph:
    """Exports a module whose output ``first`` starts with the axes ``lead``, and compares module and graph.

    Raises `ExportError` if the module cannot be exported, fixes an axis, computes in a type other than f32, or returns values
    that are not finite.
    """
    try:
        return _graph(place, module, inputs, first, lead, exporter)
    except ExportError:
        raise
    except Exception as e:
        raise ExportError(f"{place}: the module cannot be exported: {type(e).__name__}: {e}") from e


def _graph(place: str, module: torch.nn.Module, inputs: Sequence[Port], first: str, lead: Sequence[str], exporter: str | None) -> Graph:
    import torch

    module = _prepared(place, module)
    wrapper = _positional(place, module, [port.parameter or port.name for port in inputs], first)
    generator = torch.Generator().manual_seed(1)
    examples = Examples(inputs, generator).at(EXAMPLE)
    made = _run(place, wrapper, inputs, examples)
    if any(value.isnan().any() for value in made.values()):
        wrapper.has_softmax_of_nothing = True
        made = _run(place, wrapper, inputs, examples)
    outputs = _checked_outputs(place, made, first, lead)
    twice = [port.name for port in inputs if port.name in outputs]
    if twice:
        raise ExportError(
            f"{place}: `{twice[0]}` is an input and an output, expected one meaning: give the feature another name, "
            f'as in Ids("{twice[0]}_ids", ..., column="{twice[0]}")'
        )
    _finite(place, made, wrapper, inputs, examples)
    dynamic = [{n: axis for n, axis in enumerate(port.shape) if isinstance(axis, str)} for port in inputs]
    with _plain_attention():
        proto = write_graph(place, wrapper, examples, dynamic, [port.name for port in inputs], list(outputs), exporter)
    graph = Graph(f"{place}.onnx", wrapper, tuple(inputs), outputs, proto, None)
    return replace(graph, difference=_difference(place, graph, torch.Generator().manual_seed(_SEED)))


def _outside(name: str, kind: str) -> torch.nn.Module:
    import torch

    class Outside(torch.nn.Module):
        """Placeholder for a collection of tables in the copy of a module."""

        def forward(self, *_: Any, **__: Any) -> Any:
            raise ExportError(
                f"`{name}` is a {kind}; lookups happen outside the graph: give it as `tables`, and let forward take the looked-up rows"
            )

    return Outside()


def _prepared(place: str, module: torch.nn.Module) -> torch.nn.Module:
    import torch

    outside = {name: part for name, part in module.named_modules() if is_collection(part)}
    memo: dict[int, Any] = {id(part): _outside(name, type(part).__name__) for name, part in outside.items()}
    held = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in held:
        if torch.nn.parameter.is_lazy(tensor):
            raise ExportError(f"{place}: `{name}` has no shape yet; run the module once before")
        if tensor.is_meta and not any(name.startswith(f"{one}.") for one in outside):
            raise ExportError(f"{place}: `{name}` is on the device `meta`, which holds no numbers; load the module's weights to the CPU before")
    try:
        module = copy.deepcopy(module, memo).cpu().eval()
    except Exception as e:
        raise ExportError(f"{place}: the module cannot be copied; the export works on a copy, to leave the module unchanged: {type(e).__name__}: {e}") from e
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
        """The module with inputs by position and outputs by name."""

        def __init__(self) -> None:
            super().__init__()
            self.module, self.has_softmax_of_nothing = module, False

        def forward(self, *inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            with _softmax_of_nothing() if self.has_softmax_of_nothing else contextlib.nullcontext():
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
    except ExportError as e:
        raise ExportError(str(e) if str(e).startswith(place) else f"{place}: {e}") from e.__cause__
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


def _finite(
    place: str, made: Mapping[str, torch.Tensor], wrapper: torch.nn.Module, inputs: Sequence[Port], examples: Sequence[torch.Tensor]
) -> None:
    """Rejects outputs that are not finite, and names the row of the inputs and the operation that cause them."""
    import torch

    for name, value in made.items():
        is_finite = torch.isfinite(value).flatten(1).all(1)
        if not is_finite.all():
            row = _shown_row(inputs, examples, int((~is_finite).nonzero()[-1]))
            operation, line = _first_not_finite(wrapper, examples)
            where = f", first by `{operation}` in {line}" if operation else ""
            advice = (
                _OF_NOTHING.get(operation, _OF_NOTHING["softmax"]) if "nothing" in row
                else "numbers are taken from samples and items if these are given"
            )  # fmt: skip
            raise ExportError(f"{place}: output `{name}` is not finite for random inputs, {row}{where}; {advice}")


_DIVIDE = "divide by at least a small number, as in x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1), or take F.normalize for x / x.norm()"
_LARGEST = "fill with a finite number, as torch.finfo(x.dtype).min, and multiply by 1 if any value is present, else by 0: mask.amax(1, keepdim=True)"
# Advice for operations that are undefined for a row without values.
_OF_NOTHING = {
    "softmax": "mask with a large finite negative number, not with -inf or a boolean mask in a softmax, and divide by at least a small number",
    **dict.fromkeys(("div", "divide", "__truediv__", "true_divide", "__rtruediv__", "mean", "nanmean"), _DIVIDE),
    **dict.fromkeys(("max", "amax", "min", "amin", "logsumexp", "max_pool1d", "adaptive_max_pool1d"), _LARGEST),
    **dict.fromkeys(("log", "log2", "log10", "rsqrt", "reciprocal"), "take it of a number above 0: x.clamp(min=1e-6)"),
}


def _first_not_finite(wrapper: torch.nn.Module, examples: Sequence[torch.Tensor]) -> tuple[str, str]:
    """Returns the first operation of a module that makes a NaN, else the last operation that makes an infinite number, and the line of the
    program that calls it; empty texts if no operation does."""
    import torch
    from torch.overrides import TorchFunctionMode

    found: dict[str, tuple[str, str]] = {}
    ours = (os.path.dirname(torch.__file__), os.path.dirname(__file__))

    def holds(value: Any, is_wrong: Any) -> bool:
        several = value if isinstance(value, (tuple, list)) else (value,)
        return any(isinstance(one, torch.Tensor) and one.is_floating_point() and bool(is_wrong(one).any()) for one in several)

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            for what, is_wrong in (("nan", torch.isnan), ("inf", torch.isinf)):
                if (what == "inf" or what not in found) and holds(made, is_wrong):
                    frame = sys._getframe(1)
                    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
                        frame = frame.f_back
                    line = f"{frame.f_code.co_name}, {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                    found[what] = (getattr(func, "__name__", str(func)), line)
            return made

    with torch.no_grad(), _plain_attention(), Watch():
        wrapper(*examples)
    return found.get("nan") or found.get("inf") or ("", "")


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


def _softmax_of_nothing() -> Any:
    """Returns a mode in which the softmax of a row of -inf is 0, as in ``scaled_dot_product_attention``, and not NaN."""
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    class Defined(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            made = func(*args, **named)
            if func is F.multi_head_attention_forward and named.get("need_weights"):
                attended, _ = func(*args, **named | {"need_weights": False})
                return attended, torch.where(made[1].isnan(), torch.zeros_like(made[1]), made[1])
            if func not in (torch.softmax, F.softmax, torch.Tensor.softmax):
                return made
            x, dim = args[0] if args else named["input"], args[1] if len(args) > 1 else named["dim"]
            is_any = x.amax(dim, keepdim=True) >= torch.finfo(x.dtype).min
            return torch.where(is_any, made, torch.zeros_like(made))

    return Defined()


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


def _difference(place: str, graph: Graph, generator: torch.Generator) -> float | None:
    """Returns the largest difference between module and exported graph; infinite if either result is NaN."""
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
        _finite(place, wanted, graph.module, graph.inputs, examples)
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
