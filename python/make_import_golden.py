"""Writes the reference graphs of PyTorch's exporters: python/make_import_golden.py [OUT=tests/golden/import]

OUT receives functions.onnx and indexing.onnx, each of whose outputs is one operator of the table in docs/guide/own-model.md;
fused.onnx with operators of the domain com.microsoft; old.onnx of opset 9; powers.onnx with angles, powers, remainders and columns;
windows.onnx with convolutions, pools and normalisation of channels; heads.onnx with attention and rotary embeddings;
kinds.onnx with element types; and patterns of PyTorch modules (last state of a
sequence, constant indices in any axis, masks from lengths, flips, pads) by both exporters of PyTorch. cases.json has inputs with
the outputs of onnxruntime. The first axis of every input and output counts rows. Everything is derived from SEED.

Needs numpy, onnx, onnxruntime, onnxscript and torch.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

SEED = 11
ROWS, S, D = 4, 5, 4


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns numbers with a short form in JSON."""
    return (random.integers(-96, 97, size=shape) / 64).astype(np.float32)


class Nodes:
    """A graph in the making, over `x` [Q, 5, 4], `x_mask` [Q, 5] of 0 and 1 from the start, and `z` [Q, 4]."""

    def __init__(self) -> None:
        self.nodes, self.constants, self.outputs = [], [], []

    def made(self, operator: str, *inputs: str | np.ndarray, results: int = 1, domain: str = "", **attributes: object) -> list[str]:
        names = []
        for value in inputs:
            if isinstance(value, np.ndarray):
                self.constants.append(numpy_helper.from_array(value, f"c{len(self.constants)}"))
                value = self.constants[-1].name
            names.append(value)
        own = [f"v{len(self.nodes)}_{n}" for n in range(results)]
        self.nodes.append(helper.make_node(operator, names, own, domain=domain, **attributes))
        return own

    def __call__(self, operator: str, *inputs: str | np.ndarray, **attributes: object) -> str:
        return self.made(operator, *inputs, **attributes)[0]

    def keep(self, name: str) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    def number(self, name: str) -> str:
        """Returns integers or booleans as numbers."""
        return self("Cast", name, to=TensorProto.FLOAT)

    def model(self, name: str, opset: int) -> onnx.ModelProto:
        shaped = lambda name, *sizes: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["Q", *sizes])  # noqa: E731
        inputs = [shaped("x", S, D), shaped("x_mask", S), shaped("z", D)]
        graph = helper.make_graph(self.nodes, name, inputs, self.outputs, self.constants)
        domains = sorted({node.domain for node in self.nodes} - {""})
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


f = lambda *values: np.array(values, dtype=np.float32)  # noqa: E731
i = lambda *values: np.array(values, dtype=np.int64)  # noqa: E731
scalar = lambda value: np.array(value, dtype=np.int64)  # noqa: E731
real = lambda value: np.array(value, dtype=np.float32)  # noqa: E731


def functions(random: np.random.Generator) -> onnx.ModelProto:
    """One output per element-wise operator, reduction, scan and normalisation."""
    g = Nodes()
    for operator in ["Selu", "Celu", "Softsign", "Mish", "Floor", "Ceil", "Round", "Swish"]:
        g.keep(g(operator, "x"))
    g.keep(g("Round", g("Mul", "x", f(2.0))))
    g.keep(g("Celu", "x", alpha=0.5))
    g.keep(g("Swish", "x", alpha=1.5))
    g.keep(g("ThresholdedRelu", "x", alpha=0.25))
    g.keep(g("Shrink", "x", lambd=0.25, bias=0.125))
    g.keep(g("Gelu", "x", approximate="tanh"))
    g.keep(g("Hardmax", g("Round", "x"), axis=1))
    g.keep(g("Mean", "x", g("Unsqueeze", "z", i(1)), numbers(random, 4)))
    g.keep(g("Pow", g("Add", g("Abs", "x"), f(0.5)), f(0.3)))
    infinite = g("Log", g("Relu", "x"))
    g.keep(g.number(g("IsInf", infinite)))
    g.keep(g.number(g("IsInf", infinite, detect_negative=0)))
    g.keep(g("ReduceProd", "x", i(1), keepdims=0))
    g.keep(g("ReduceLogSum", g("Abs", "x"), i(2)))
    for exclusive in [0, 1]:
        for reverse in [0, 1]:
            g.keep(g("CumSum", "x", scalar(1), exclusive=exclusive, reverse=reverse))
    g.keep(g("CumSum", "x_mask", scalar(-1)))
    for largest in [0, 1]:
        values, places = g.made("TopK", g("Round", "x"), i(3), results=2, axis=1, largest=largest)
        g.keep(values)
        g.keep(g.number(places))
    count = g("Cast", g("ReduceSum", "x_mask", i(1)), to=TensorProto.INT64)
    g.keep(g.number(g("Div", count, i(2))))
    g.keep(g.number(g("Mod", g("Sub", count, i(7)), i(3))))
    g.keep(g("OneHot", count, scalar(6), f(-1.0, 2.0), axis=1))
    # Unread results of operators with several outputs.
    g.keep(g("LayerNormalization", "x", numbers(random, 4), numbers(random, 4), results=3))
    g.keep(g("RMSNormalization", "x", numbers(random, 4)))
    g.keep(g("Dropout", "x", results=2))
    g.keep(g("Einsum", "x", "x_mask", equation="...sd,...s->...d"))
    g.keep(g("Einsum", "x", "x_mask", numbers(random, 5, 3), equation="bsd,bs,sk->bdk"))
    g.keep(g("Einsum", "x", equation="bsd->bds"))
    g.keep(g("Einsum", "x", numbers(random, 4, 2), equation="bsd,de"))
    # Weights in half and double precision.
    half = g("Cast", numbers(random, 4, 3).astype(np.float16), to=TensorProto.FLOAT)
    double = g("Cast", numbers(random, 4, 3).astype(np.float64), to=TensorProto.FLOAT)
    g.keep(g("MatMul", "x", g("Add", half, double)))
    return g.model("functions", 24)


def indexing(random: np.random.Generator) -> onnx.ModelProto:
    """One output per operator that moves numbers, with constant indices and with indices of each row."""
    g = Nodes()
    rows = g("Shape", "x", end=1)
    length = g("Cast", g("ReduceSum", "x_mask", i(1), keepdims=0), to=TensorProto.INT64)
    last = g("Max", g("Sub", length, i(1)), i(0))
    for mode, pads in [("constant", [0, 1, 2, 0, 0, 1]), ("edge", [0, 2, 0, 0, 1, 3]), ("reflect", [0, 3, 1, 0, 2, 2])]:
        g.keep(g("Pad", "x", i(*pads), *([real(0.5)] if mode == "constant" else []), mode=mode))
    g.keep(g("Pad", "x", i(-1, 2), "", i(1), mode="constant"))
    g.keep(g("Slice", "x", i(-1, 3), i(-(2**63), 0), i(1, 2), i(-1, -2)))
    g.keep(g("Transpose", g("GatherND", g("Transpose", "x", perm=[2, 1, 0]), np.array([[3, 1], [0, -1]], dtype=np.int64)), perm=[1, 0]))
    wide = g("Expand", g("Reshape", last, i(-1, 1, 1)), i(1, 1, 4))
    g.keep(g("GatherElements", "x", wide, axis=1))
    each = g("Cast", g("Mul", g("Abs", "x"), f(3.0)), to=TensorProto.INT64)
    g.keep(g("GatherElements", "x", g("Min", each, i(4)), axis=1))
    g.keep(g("GatherND", "x", g("Unsqueeze", last, i(-1)), batch_dims=1))
    both = g("Concat", g("Unsqueeze", last, i(-1)), g("Unsqueeze", g("Min", last, i(3)), i(-1)), axis=-1)
    g.keep(g("GatherND", "x", both, batch_dims=1))
    # Tables that all rows share, also by indices from the end.
    g.keep(g("Gather", numbers(random, 6, 3), length))
    g.keep(g("Transpose", g("Gather", numbers(random, 3, 6), g("Sub", length, i(6)), axis=1), perm=[1, 0]))
    infinite = numbers(random, 6)
    infinite[5] = np.inf
    g.keep(g("Gather", infinite, g("Min", length, i(4))))
    positions = g("Expand", np.arange(5, dtype=np.int64)[None], g("Concat", rows, i(5), axis=0))
    g.keep(g("Add", "x", g("Gather", numbers(random, 5, 4), positions)))
    g.keep(g("Add", "x", g("Gather", numbers(random, 2, 4), g("ConstantOfShape", g("Shape", "x_mask"), value=numpy_helper.from_array(i(1))))))
    g.keep(g("ScatterElements", "z", g("Expand", np.array([[2, 0]], dtype=np.int64), g("Concat", rows, i(2), axis=0)), g("Slice", "z", i(1), i(3), i(1)), axis=1))
    turned = g("Transpose", "x", perm=[1, 0, 2])
    update = g("Transpose", g("Slice", "x", i(0), i(2), i(1)), perm=[1, 0, 2])
    g.keep(g("Transpose", g("ScatterND", turned, np.array([[4], [1]], dtype=np.int64), update), perm=[1, 0, 2]))
    # Integers of several axes, as masks and relative positions are written.
    grid = g("Sub", g("Unsqueeze", np.arange(5), i(1)), g("Unsqueeze", np.arange(5), i(0)))
    flipped = g("Slice", g("Transpose", grid, perm=[1, 0]), i(-1), i(-(2**63)), i(0), i(-1))
    pairs = g("Reshape", g("Concat", grid, flipped, axis=0), i(2, 5, 5))
    index = g("Add", g("Gather", pairs, scalar(1)), i(4))
    g.keep(g("MatMul", g("Gather", numbers(random, 9), index), "x"))
    causal = g("Not", g("Less", grid, i(0)))
    seen = g("And", g("Unsqueeze", causal, i(0)), g("Unsqueeze", g("Cast", "x_mask", to=TensorProto.BOOL), i(1)))
    g.keep(g("Where", seen, g("MatMul", "x", g("Transpose", "x", perm=[0, 2, 1])), real(-1e4)))
    count = g("ReduceProd", g("Shape", "x", start=1), keepdims=0)
    g.keep(g("Reshape", "x", g("Concat", i(-1), g("Unsqueeze", count, i(0)), axis=0), allowzero=1))
    size = g("Div", g("Size", "x"), g("Squeeze", rows))
    g.keep(g("Mul", "z", g.number(size)))
    chosen = g("NonZero", g("Equal", g("Mod", np.arange(4), i(2)), i(1)))
    g.keep(g("Gather", "z", g("Reshape", chosen, i(-1)), axis=1))
    return g.model("indexing", 20)


def fused(random: np.random.Generator) -> onnx.ModelProto:
    """Operators that the optimizer of ONNX Runtime writes."""
    g = Nodes()
    w = lambda *shape: numbers(random, *shape)  # noqa: E731
    one = lambda operator, *inputs, **more: g.keep(g(operator, *inputs, domain="com.microsoft", **more))  # noqa: E731
    one("Gelu", "x")
    one("BiasGelu", "x", w(4))
    one("FastGelu", "x")
    one("FastGelu", "x", w(4))
    one("QuickGelu", "x", alpha=1.5)
    one("FusedMatMul", "x", "x", transB=1, alpha=0.5)
    one("FusedMatMul", "x", "x", transA=1)
    other = g("Mul", "x", "x")
    for inputs in [("x", other, w(4), w(4), w(4)), ("x", other, w(4))]:
        made = g.made("SkipLayerNormalization", *inputs, results=4, domain="com.microsoft", epsilon=1e-5)
        g.keep(made[0])
        g.keep(made[3])
    one("SkipSimplifiedLayerNormalization", "x", other, w(4), epsilon=1e-5)
    g.keep(g("SimplifiedLayerNormalization", "x", w(4), axis=-1, epsilon=1e-5))
    return g.model("fused", 20)


def old(random: np.random.Generator) -> onnx.ModelProto:
    """Attributes of opset 9 that later ones take as inputs."""
    g = Nodes()
    g.keep(g("Slice", "x", starts=[1, 0], ends=[4, 2**62], axes=[1, 2]))
    g.keep(g("Softmax", "x", axis=1))
    g.keep(g("LogSoftmax", "x", axis=1))
    g.keep(g("Pad", "x", pads=[0, 1, 0, 0, 0, 2], value=0.5))
    g.keep(g("Unsqueeze", g("ReduceSum", "x", axes=[1], keepdims=0), axes=[1]))
    g.keep(g("Clip", "x", min=-0.5, max=0.5))
    g.keep(g.made("Split", "x", results=2, axis=1, split=[2, 3])[1])
    return g.model("old", 9)


def powers(random: np.random.Generator) -> onnx.ModelProto:
    """Angles, powers of numbers, remainders, and products with columns."""
    g = Nodes()
    inside = g("Mul", "x", f(0.625))
    for operator in ["Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh"]:
        g.keep(g(operator, "x"))
    for operator in ["Asin", "Acos", "Atanh"]:
        g.keep(g(operator, inside))
    size = g("Add", g("Abs", "x"), f(1.0))
    g.keep(g("Acosh", size))
    g.keep(g("Cos", g("Mul", "x", f(100.0))))
    g.keep(g("Pow", f(2.0), "x"))
    g.keep(g("Pow", size, numbers(random, 4)))
    g.keep(g("Pow", size, g("Unsqueeze", "z", i(1))))
    g.keep(g("Pow", size, f(-11.0)))
    g.keep(g("Pow", "x", f(0.0)))
    g.keep(g("Mod", "x", g("Neg", size), fmod=1))
    g.keep(g("Mod", "x", f(0.3125), fmod=1))
    # Constant matrices times columns.
    column = g("Unsqueeze", "z", i(2))
    g.keep(g("MatMul", numbers(random, 3, 4), column))
    g.keep(g("Add", column, g("MatMul", numbers(random, 4, 4), g("Mul", column, column))))
    return g.model("powers", 24)


def windows(random: np.random.Generator) -> onnx.ModelProto:
    """One output per form of a convolution, a pool, and a normalisation of channels."""
    g = Nodes()
    w = lambda *shape: numbers(random, *shape)  # noqa: E731
    channels = g("Transpose", "x", perm=[0, 2, 1])
    plane = g("Unsqueeze", "x", i(1))
    for attributes in [{}, {"pads": [1, 1]}, {"pads": [4, 0], "dilations": [2]}, {"strides": [2], "pads": [0, 2]}, {"auto_pad": "SAME_UPPER", "strides": [2]}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "VALID"}]:
        g.keep(g("Conv", channels, w(3, 4, 3 if "auto_pad" not in attributes else 2), w(3), **attributes))
    g.keep(g("Transpose", g("Relu", g("Conv", channels, w(4, 4, 1))), perm=[0, 2, 1]))
    g.keep(g("Conv", g("Sigmoid", g("Conv", channels, w(6, 4, 2), w(6))), w(2, 6, 2)))
    g.keep(g("Conv", channels, w(4, 1, 3), w(4), group=4, pads=[2, 0]))
    g.keep(g("Conv", channels, w(4, 1, 2), group=4, strides=[2]))
    g.keep(g("Conv", channels, w(8, 1, 3), w(8), group=4, dilations=[2]))
    g.keep(g("Conv", channels, w(6, 2, 3), w(6), group=2, pads=[1, 1]))
    g.keep(g("Conv", plane, w(3, 1, 2, 4), w(3)))
    g.keep(g("Conv", plane, w(2, 1, 3, 2), pads=[2, 0, 1, 1], strides=[2, 1], dilations=[1, 2], kernel_shape=[3, 2]))
    g.keep(g("Conv", g("Conv", plane, w(4, 1, 2, 2)), w(4, 1, 2, 1), group=4))
    for operator in ["MaxPool", "AveragePool"]:
        g.keep(g(operator, channels, kernel_shape=[3], pads=[1, 1]))
        g.keep(g(operator, channels, kernel_shape=[2], strides=[2], ceil_mode=1))
        g.keep(g(operator, plane, kernel_shape=[5, 1]))
        g.keep(g(operator, plane, kernel_shape=[2, 3], strides=[2, 1], pads=[1, 0, 0, 1], dilations=[2, 1]))
    g.keep(g("AveragePool", channels, kernel_shape=[3], pads=[1, 2], strides=[2], count_include_pad=1))
    g.keep(g("MaxPool", plane, kernel_shape=[2, 2], auto_pad="SAME_UPPER", results=2))
    g.keep(g("GlobalMaxPool", channels))
    g.keep(g("GlobalMaxPool", plane))
    g.keep(g("InstanceNormalization", channels, w(4), w(4), epsilon=0.01))
    g.keep(g("GroupNormalization", channels, w(4), w(4), num_groups=2))
    return g.model("windows", 22)


def heads(random: np.random.Generator) -> onnx.ModelProto:
    """Attention and rotary embeddings as one operator: masks of every row, windows, groups of queries, positions of each row."""
    g = Nodes()
    w = lambda *shape: numbers(random, *shape)  # noqa: E731
    own = lambda operator, *inputs, **more: g(operator, *inputs, domain="com.microsoft", **more)  # noqa: E731
    q, k, v = (g("MatMul", "x", w(4, 32)) for _ in range(3))
    k1, v1 = (g("MatMul", "x", w(4, 16)) for _ in range(2))
    count = g("ReduceSum", "x_mask", i(1), keepdims=0)
    seen = g("Expand", g("Cast", g("Unsqueeze", "x_mask", i(1, 2)), to=TensorProto.BOOL), i(1, 1, 5, 1))
    none = g("Log", g("Expand", g("Unsqueeze", "x_mask", i(1, 2)), i(1, 1, 5, 1)))  # 0, and -inf where it is masked
    bias = w(1, 2, 5, 5)
    same = {"q_num_heads": 2, "kv_num_heads": 2}
    g.keep(g("Attention", q, k, v, **same))
    g.keep(g("Attention", q, k, v, seen, **same, is_causal=1))
    g.keep(g("Attention", q, k, v, none, **same, scale=0.5, softcap=2.0))
    g.keep(g("Attention", q, k, v, bias, **same, left_window_size=1, right_window_size=2))
    g.keep(g("Attention", q, k1, v1, q_num_heads=2, kv_num_heads=1, is_causal=1))
    g.keep(g("Attention", g("MatMul", "x", w(4, 32)), g("MatMul", "x", w(4, 16)), g("MatMul", "x", w(4, 8)), q_num_heads=4, kv_num_heads=2))
    g.keep(g("Attention", q, k, v, "", "", "", g("Cast", count, to=TensorProto.INT64), **same))
    g.keep(g("Attention", q, k, v, "", "", "", g("Cast", count, to=TensorProto.INT64), **same, is_causal=1))
    split = lambda name: g("Transpose", g("Reshape", name, i(0, 0, 2, 16)), perm=[0, 2, 1, 3])  # noqa: E731
    g.keep(g.made("Attention", split(q), split(k), split(v), results=3)[0])
    whole = g("Cast", "x_mask", to=TensorProto.INT32)
    square = g("Cast", g("Mul", g("Unsqueeze", "x_mask", i(1)), g("Unsqueeze", "x_mask", i(2))), to=TensorProto.INT32)
    g.keep(own("MultiHeadAttention", q, k, v, num_heads=2))
    g.keep(own("MultiHeadAttention", q, k, v, w(96), whole, num_heads=2, mask_filter_value=-2.0))
    g.keep(own("MultiHeadAttention", q, k, v, "", square, bias, num_heads=2, mask_filter_value=-3.0, unidirectional=1))
    g.keep(own("MultiHeadAttention", q, split(k), split(v), num_heads=2, scale=0.125))
    angles = [w(8, 8), w(8, 8)]
    valid = g("Cast", g("Sub", g("Max", count, f(1.0)), f(1.0)), to=TensorProto.INT32)
    total = np.array(5, dtype=np.int32)
    grouped = lambda *inputs, **more: g.keep(g.made("GroupQueryAttention", *inputs, results=3, domain="com.microsoft", num_heads=2, kv_num_heads=1, **more)[0])  # noqa: E731
    grouped(q, k1, v1, "", "", valid, total)
    # With `softcap`, queries behind the last valid key read undefined memory of ONNX Runtime.
    last = g("Cast", g("Add", g("Mul", count, f(0.0)), f(4.0)), to=TensorProto.INT32)
    grouped(q, k1, v1, "", "", valid, total, local_window_size=2, scale=0.25)
    grouped(q, k1, v1, "", "", last, total, local_window_size=3, softcap=3.0)
    grouped(g("Concat", q, k1, v1, axis=-1), "", "", "", "", valid, total)
    for interleaved in [0, 1]:
        grouped(q, k1, v1, "", "", valid, total, *angles, do_rotary=1, rotary_interleaved=interleaved)
    position = g("Cast", g("Max", g("Sub", g("CumSum", "x_mask", scalar(1)), f(1.0)), f(0.0)), to=TensorProto.INT64)
    for interleaved in [0, 1]:
        more = {"interleaved": interleaved}
        g.keep(own("RotaryEmbedding", q, position, *angles, **more))
        g.keep(own("RotaryEmbedding", q, i(2), *angles, **more))
        g.keep(own("RotaryEmbedding", split(q), position, w(8, 4), w(8, 4), num_heads=2, rotary_embedding_dim=8, **more))
        g.keep(g("RotaryEmbedding", split(q), *angles, position, **more))
        g.keep(g("RotaryEmbedding", q, g("Gather", angles[0], position), g("Gather", angles[1], position), num_heads=2, **more))
        g.keep(g("RotaryEmbedding", q, w(8, 4), w(8, 4), position, num_heads=2, rotary_embedding_dim=8, **more))
    return g.model("heads", 25)


def kinds(random: np.random.Generator) -> onnx.ModelProto:
    """Element types: half precision, the type of another value, integers beyond 24, 31 and 53 bits; and some more operators."""
    g = Nodes()
    w = lambda *shape: numbers(random, *shape)  # noqa: E731
    third = g("Div", "x", f(3.0))
    half = g("Cast", third, to=TensorProto.FLOAT16)
    g.keep(g.number(half))
    g.keep(g.number(g("Cast", g("Div", "x", f(3.0)), to=TensorProto.BFLOAT16)))
    g.keep(g.number(g("Transpose", g("Relu", half), perm=[0, 2, 1])))
    g.keep(g.number(g("CastLike", third, f(0.0).astype(np.float16))))
    g.keep(g("CastLike", g("CastLike", g("Mul", "x", f(7.0)), i(0)), "x"))
    # Half precision ends at 65,504.
    g.keep(g("Clip", g.number(g("Cast", g("Mul", "x", f(1e5)), to=TensorProto.FLOAT16)), real(-1e9), real(1e9)))
    large = g("Mul", "z", f(2.0**20 + 16, 2.0**25 + 1024, 2.0**36, 2.0**57))
    for divisor in [24, 7, 1009]:
        g.keep(g.number(g("Mod", g("Cast", large, to=TensorProto.INT64), scalar(divisor))))
    g.keep(g.number(g("Mod", g("Max", g("Cast", large, to=TensorProto.INT64), scalar(0)), i(24, 60, 1000, 3))))
    g.keep(g.number(g("Cast", large, to=TensorProto.INT64)))
    g.keep(g("Sin", g("Mul", "x", f(50.0))))
    g.keep(g("GlobalAveragePool", g("Transpose", "x", perm=[0, 2, 1])))
    square = g("MatMul", "x", g("Transpose", "x", perm=[0, 2, 1]))
    g.keep(g("Einsum", square, equation="bii->bi"))
    g.keep(g("Einsum", square, equation="...ii->..."))
    g.keep(g("Einsum", square, "x_mask", equation="bii,bi->bi"))
    g.keep(g("Einsum", w(3, 3, 4), "z", equation="iij,bj->bi"))
    return g.model("kinds", 24)


class Patterns(nn.Module):
    """Modules for sequences: last states, constant indices, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.register_buffer("pairs", torch.triu_indices(S, S, 1))
        self.position = nn.Embedding(S + 1, D)
        self.gru = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, m: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = m.sum(1).long()
        last = (count - 1).clamp(min=0)
        places = (torch.cumsum(m, 1) * m).long()
        causal = torch.arange(S)[None, :] <= torch.arange(S)[:, None]
        scores = torch.bmm(x, x.transpose(1, 2))
        masked = scores.masked_fill(~(causal[None] & (m[:, None] > 0)), -1e9)
        return (
            x.gather(1, last.view(-1, 1, 1).expand(-1, 1, D))[:, 0],
            x[torch.arange(x.shape[0]), last],
            scores[:, self.pairs[0], self.pairs[1]],
            z[:, self.order],
            x[:, :, self.order],
            x.flip(1) + x.roll(1, 1),
            m - F.pad(m[:, 1:], (0, 1)),
            x + self.position(places),
            masked.softmax(-1) @ x,
            F.one_hot(count, S + 1).float(),
            (count // 2).float() + (count % 2).float(),
            x.std(1) + F.gelu(x, approximate="tanh").sum(1),
            F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0],
            x.sum(-1).topk(3, dim=1)[0],
            torch.zeros_like(x).index_copy(1, torch.tensor([0, 2]), x[:, :2]),
        )


def exported(is_dynamo: bool) -> onnx.ModelProto:
    """Returns the patterns by one of PyTorch's exporters, with its own default opset."""
    inputs = (torch.randn(3, S, D), torch.ones(3, S), torch.randn(3, D))
    names = {"input_names": ["x", "x_mask", "z"], "output_names": [f"out{n}" for n in range(15)]}
    into = io.BytesIO()
    with contextlib.redirect_stdout(io.StringIO()):
        if is_dynamo:
            rows = {0: torch.export.Dim("Q")}
            model = torch.onnx.export(Patterns().eval(), inputs, dynamo=True, dynamic_shapes=(rows,) * 3, verbose=False, **names).model_proto
        else:
            open_axes = {name: {0: "Q"} for name in names["input_names"]}
            torch.onnx.export(Patterns().eval(), inputs, into, dynamo=False, dynamic_axes=open_axes, **names)
            model = onnx.load_from_string(into.getvalue())
    for part in [model, *model.graph.node, *model.graph.input, *model.graph.output, model.graph]:
        del part.metadata_props[:]
        part.doc_string = ""
    del model.graph.value_info[:]
    return model


def case(out: Path, name: str, model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, object]:
    """Writes a graph; returns its inputs and the outputs of onnxruntime."""
    path = out / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    made = session.run(None, inputs)
    short = lambda x: [float(f"{v:.8g}") for v in x.ravel().tolist()]  # noqa: E731
    wrong = [o.name for o, x in zip(session.get_outputs(), made) if x.shape[0] != ROWS or not np.isfinite(x).all()]
    assert not wrong, (name, wrong)
    return {
        "graph": name,
        "inputs": [{"name": n, "is_pair": True, "shape": list(x.shape), "values": short(x)} for n, x in inputs.items()],
        "outputs": [{"name": o.name, "shape": list(x.shape), "values": short(x)} for o, x in zip(session.get_outputs(), made)],
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/import")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    mask = np.array([[float(s < n) for s in range(S)] for n in [3, 0, 5, 1]], dtype=np.float32)
    inputs = {"x": numbers(random, ROWS, S, D), "x_mask": mask, "z": numbers(random, ROWS, D)}
    cases = [case(out, make.__name__, make(random), inputs) for make in [functions, indexing, fused, old, powers, windows, heads, kinds]]
    for name, is_dynamo in [("patterns_dynamo", True), ("patterns_torchscript", False)]:
        cases.append(case(out, name, exported(is_dynamo), inputs))
    (out / "cases.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
