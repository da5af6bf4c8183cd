"""Writes the ONNX graph of a PyTorch module, by either of PyTorch's two exporters.

``dynamo`` is ``torch.onnx.export(dynamo=True)``, built on ``torch.export`` and PyTorch's default since 2.9; ``torchscript`` traces
the module as PyTorch did before. Both write opset 18, the lowest opset that ``dynamo`` writes without conversion. File names and lines of
the exporting program, which PyTorch leaves in a graph, are removed.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ExportError

if TYPE_CHECKING:
    import onnx
    import torch

OPSET = 18
EXPORTERS = ("dynamo", "torchscript")
# Size of the largest graph that `sterling publish` reads, in bytes.
_BYTES_MAX = 1 << 30
_BRANCH = (
    "forward decides by the values of a tensor (if, while, .item(), a boolean index), and a graph computes all rows in the same way; "
    "use torch.where or a mask"
)
_PACKED = (
    "packed sequences cannot be exported; run the module over the padded rows and take the output at the last value, "
    "as in out[torch.arange(out.shape[0]), (mask.sum(1).long() - 1).clamp(min=0)]"
)
_NO_OPERATOR = "ONNX has no operator for it: compute it by others, or outside the module"
# Advice by a part of an exporter's message.
_ADVICE = (
    ("data-dependent", _BRANCH),
    ("DataDependent", _BRANCH),
    ("Python boolean", _BRANCH),
    ("pack_padded", _PACKED),
    ("PackPadded", _PACKED),
    ("PackedSequence", _PACKED),
    # Messages of both exporters when a module uses a packed sequence.
    ("must be tuple of ints,but got FakeTensor", _PACKED),
    ("vector::_M_range_check", _PACKED),
    ("No ONNX function found", _NO_OPERATOR),
    ("is not supported", _NO_OPERATOR),
)


def write_graph(
    place: str,
    module: torch.nn.Module,
    examples: Sequence[torch.Tensor],
    dynamic: Sequence[Mapping[int, str]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    exporter: str | None = None,
) -> onnx.ModelProto:
    """Exports a module that takes tensors by position and returns a mapping of ``outputs`` to tensors.

    ``dynamic`` names the axes of each input that may have any size. Without ``exporter``, modules that dynamo cannot export are traced, unless
    they branch on the values of a tensor: a trace records only one branch. Raises `ExportError` that names the operator or the
    line of the module.
    """
    failed = {}
    for kind in EXPORTERS if exporter is None else (exporter,):
        try:
            with _quiet() as told:
                proto = _by_dynamo(module, examples, dynamic, inputs, outputs) if kind == "dynamo" else _by_trace(module, examples, dynamic, inputs, outputs)
            branches = [str(one.message) for one in told if "Python boolean" in str(one.message)]
            if kind == "torchscript" and exporter is None and branches:
                raise ExportError(branches[0])
        except Exception as e:
            failed[kind] = e
            _check_axes(place, e, examples, dynamic)
            if _advice(e) == _BRANCH:
                break
        else:
            return _cleaned(place, _named(place, proto, inputs, outputs))
    first = next(iter(failed.values()))
    said = "; ".join(f"{kind}: {_reason(e)}" for kind, e in failed.items())
    advice = _advice(first)
    raise ExportError(f"{place}: PyTorch cannot export the module: {said}" + (f"; {advice}" if advice else "")) from first


def _causes(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    while at is not None:
        yield at
        at = at.__cause__


def _reason(error: BaseException) -> str:
    """Returns an exporter's error as one line: the operator, and the innermost reason."""
    said = [str(one) for one in _causes(error)]
    node = next((found[1] for text in said if (found := re.search(r"target=(?:torch\.ops\.)?([\w.]+)", text))), None)
    line = _line(error)
    lowest = next((text for text in reversed(said) if text.strip()), "")
    reason = f"{type(error).__name__}: {lowest.strip().splitlines()[0][:400]}" if lowest else type(error).__name__
    return reason + (f" (at {node})" if node and node not in reason else "") + (f" in {line}" if line else "")


def _advice(error: BaseException) -> str | None:
    said = " ".join(f"{type(one).__name__} {one}" for one in _causes(error))
    return next((advice for sign, advice in _ADVICE if sign in said), None)


def _line(error: BaseException) -> str | None:
    """Returns the line of the user's program in the innermost frame of an error's traceback."""
    import onnxscript
    import torch

    theirs = tuple(os.path.dirname(module.__file__) for module in (onnxscript, torch)) + (os.path.dirname(__file__),)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(theirs)]
    return f"{frames[-1].name}, {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def _check_axes(place: str, error: BaseException, examples: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]]) -> None:
    """Raises an error that names the axis that a module fixes, if a fixed axis caused the error."""
    said = str(error)
    sizes = {axis: example.shape[n] for example, axes in zip(examples, dynamic) for n, axis in axes.items()}
    for axis, size in sizes.items():
        if f"Constraints violated ({axis}" in said or f"specialized it to be a constant ({size})" in said:
            raise ExportError(
                f"{place}: forward fixes the axis {axis} (to the {size} of the example inputs); take sizes from the inputs, "
                f"as in x.reshape(x.shape[0], -1), not by len(x):\n{said}"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    """Suppresses the progress messages of PyTorch's exporters, and yields their warnings."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch.export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(record=True) as told, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("always")
            yield told
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)


def _by_dynamo(
    module: torch.nn.Module, examples: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    import torch

    # Without a bound, PyTorch 2.7 assumes that slices exclude the largest integer, and rejects the axis for that reason.
    dims = {name: torch.export.Dim(name, max=2**31 - 1) for axes in dynamic for name in axes.values()}
    shapes = tuple({n: dims[axis] for n, axis in axes.items()} for axes in dynamic)
    program = torch.export.export(module, tuple(examples), dynamic_shapes=(shapes,), strict=False)
    attention = {torch.ops.aten.scaled_dot_product_attention.default: _attention}
    exported = torch.onnx.export(
        program, dynamo=True, opset_version=OPSET, verbose=False, input_names=_placeholders("input", inputs),
        output_names=_placeholders("output", outputs), custom_translation_table=attention,
    )  # fmt: skip
    return exported.model_proto


def _by_trace(
    module: torch.nn.Module, examples: Sequence[torch.Tensor], dynamic: Sequence[Mapping[int, str]], inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto:
    import onnx
    import torch

    class Listed(torch.nn.Module):
        """The module with its outputs by position, as the tracing exporter needs them."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            made = self.module(*given)
            return tuple(made[name] for name in outputs)

    names = _placeholders("input", inputs)
    file = io.BytesIO()
    with _as_traced(), _silent_descriptors():
        torch.onnx.export(
            Listed().eval(), tuple(examples), file, dynamo=False, opset_version=OPSET, input_names=names,
            output_names=_placeholders("output", outputs), dynamic_axes={name: dict(axes) for name, axes in zip(names, dynamic)},
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@contextlib.contextmanager
def _as_traced() -> Iterator[None]:
    """Replaces functions that the tracing exporter does not know by others that it knows.

    Attention under a mask of -inf is computed by `_attention`, with keys repeated for grouped queries. An axis of size 1 is
    squeezed as the selection of its only value, because the exporter would write an `If` for a size that it does not know.
    """
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode

    plain, is_inside = F.scaled_dot_product_attention, [False]

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *others: Any, **named: Any) -> Any:
        if named.pop("enable_gqa", False):
            groups = int(query.shape[-3]) // int(key.shape[-3])
            of_query = torch.tensor([n // groups for n in range(int(query.shape[-3]))])
            key, value = key.index_select(-3, of_query), value.index_select(-3, of_query)
        is_any = None
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            lowest = torch.finfo(attn_mask.dtype).min
            is_any = (attn_mask.amax(-1, keepdim=True) >= lowest).to(query.dtype)
            attn_mask = attn_mask.clamp(min=lowest)
        is_inside[0] = True
        try:
            found = plain(query, key, value, attn_mask, *others, **named)
        finally:
            is_inside[0] = False
        return found if is_any is None else found * is_any

    def rms_norm(x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None) -> torch.Tensor:
        axes = list(range(-len(shape), 0))
        x = x * torch.rsqrt(x.square().mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps))
        return x if weight is None else x * weight

    class Traced(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            if func is plain and not is_inside[0]:
                return attention(*args, **named)
            if func is F.rms_norm:
                return rms_norm(*args, **named)
            if func in (torch.squeeze, torch.Tensor.squeeze):
                x, dim = args[0], args[1] if len(args) > 1 else named.get("dim")
                if isinstance(dim, int):
                    return x.select(dim, 0) if int(x.shape[dim]) == 1 else x
            return func(*args, **named)

    # Composite functions of PyTorch, such as the one of nn.MultiheadAttention, run outside of the mode.
    F.scaled_dot_product_attention = attention
    try:
        with Traced():
            yield
    finally:
        F.scaled_dot_product_attention = plain


@contextlib.contextmanager
def _silent_descriptors() -> Iterator[None]:
    """Suppresses the graph that the C++ code of the tracing exporter prints when it fails."""
    saved = [os.dup(n) for n in (1, 2)]
    with open(os.devnull, "w") as nothing:
        for n in (1, 2):
            os.dup2(nothing.fileno(), n)
    try:
        yield
    finally:
        for n, descriptor in zip((1, 2), saved):
            os.dup2(descriptor, n)
            os.close(descriptor)


def _placeholders(what: str, names: Sequence[str]) -> list[str]:
    """Returns names that exporters give to no other value: an input `cat` would collide with the value of an operator of that
    name."""
    return [f"sterling.{what}.{n}" for n in range(len(names))]


def _named(place: str, proto: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Gives inputs and outputs their names, and checks that every input is read."""
    _rename(proto, dict(zip(_placeholders("input", inputs), inputs)) | dict(zip(_placeholders("output", outputs), outputs)))
    read = {name for graph in _with_inner(proto.graph) for node in graph.node for name in node.input} | {value.name for value in proto.graph.output}
    unread = [name for name in inputs if name not in read]
    if unread:
        raise ExportError(f"{place}: forward does not read {', '.join(unread)}; remove them from forward's parameters and from the features")
    return proto


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *others: Any, **named: Any) -> Any:
    """Makes attention 0 for queries whose mask excludes all keys, as PyTorch does.

    The translation of onnxscript gives the mean of all values for a boolean mask and NaN for a mask of -inf.
    """
    from onnxscript import ir
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    if len(query.shape) == 3:
        # The translation supports only attention with an axis of heads.
        head = op.Constant(value_ints=[1])

        def with_head(x: Any) -> Any:
            made = op.Unsqueeze(x, head)
            made.shape, made.dtype = ir.Shape([x.shape[0], 1, *x.shape[1:]]), x.dtype
            return made

        mask = with_head(attn_mask) if attn_mask is not None and len(attn_mask.shape) == 3 else attn_mask
        return op.Squeeze(_attention(with_head(query), with_head(key), with_head(value), mask, *others, **named), head)
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
    """Renames values of a graph; values that already have one of the new names get other names."""
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
    """Yields a graph and, recursively, the subgraphs within its nodes."""
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
    size = sum(len(tensor.raw_data) for tensor in graph.initializer)
    if size > _BYTES_MAX:
        raise ExportError(
            f"{place}: {size} bytes of weights, expected at most {_BYTES_MAX}: give weights that are looked up by id as `tables`, and let forward take the rows"
        )
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
