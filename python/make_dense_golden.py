"""Writes the reference graphs of dense programs: python/make_dense_golden.py [OUT=tests/golden/dense]

OUT receives models that PyTorch's exporter wrote (a SASRec-like and a transformer tower, attention over a history, mixture of
logits, DCN-v2, DeepFM), operators.onnx, each of whose outputs is one operator of the table in docs/guide/own-model.md, and
cases.json: inputs of each graph with the outputs of onnxruntime. Recurrent layers are in recurrent.onnx and sequences.json. The
first axis of an input of a tower counts rows; for an OverArch it is 1 and the second axis counts candidates. Everything is derived
from SEED.

Needs numpy, onnx, onnxruntime, onnxscript and torch.
"""

from __future__ import annotations

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

SEED = 7
D, S, H = 8, 5, 2
ROWS = 5


class SasRec(nn.Module):
    """Two blocks of `nn.MultiheadAttention` over a history, causal and padded on the left; the last position is the query."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(S, D)
        self.attention = nn.ModuleList([nn.MultiheadAttention(D, H, batch_first=True) for _ in range(2)])
        self.first = nn.ModuleList([nn.LayerNorm(D) for _ in range(2)])
        self.second = nn.ModuleList([nn.LayerNorm(D) for _ in range(2)])
        self.wide = nn.ModuleList([nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)) for _ in range(2)])

    def forward(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = (history + self.position(torch.arange(S))) * mask.unsqueeze(-1)
        later = torch.triu(torch.full((S, S), -1e9), 1)
        for attention, first, second, wide in zip(self.attention, self.first, self.second, self.wide):
            y = first(x)
            padded = (mask == 0).float() * -1e9
            seen, _ = attention(y, y, y, attn_mask=later, key_padding_mask=padded, need_weights=False)
            x = x + seen
            x = (x + wide(second(x))) * mask.unsqueeze(-1)
        return F.normalize(x[:, -1], dim=-1)


class Pooled(nn.Module):
    """`scaled_dot_product_attention` with a boolean mask, and the mean over the valid positions."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows = history.shape[0]
        heads = lambda x: x.view(rows, S, H, D // H).transpose(1, 2)  # noqa: E731
        q, k, v = (heads(x) for x in self.into(history).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=(mask > 0)[:, None, None, :])
        x = self.out(seen.transpose(1, 2).reshape(rows, S, D)) * mask.unsqueeze(-1)
        return F.normalize(x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1), dim=-1)


class Encoder(nn.Module):
    """A layer of PyTorch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, H, 12, batch_first=True, activation="gelu", norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.encoder(history, src_key_padding_mask=(mask == 0))[:, -1]


class Din(nn.Module):
    """Attention of each candidate over a history, by a small network; batch norm and SiLU behind."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(4 * D, 12), nn.PReLU(), nn.Linear(12, 1))
        self.into, self.norm, self.out = nn.Linear(3 * D, 12), nn.BatchNorm1d(12), nn.Linear(12, 2)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, query: torch.Tensor, item: torch.Tensor, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        users, count, _ = item.shape
        own = item.unsqueeze(2).expand(users, count, S, D)
        seen = history.unsqueeze(1).expand(users, count, S, D)
        weight = self.attention(torch.cat([own, seen, own - seen, own * seen], -1)).squeeze(-1)
        weight = weight.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1)
        pooled = torch.einsum("qks,qsd->qkd", weight, history)
        x = self.into(torch.cat([item, pooled, query.unsqueeze(1).expand(users, count, D)], -1))
        x = self.norm(x.reshape(-1, 12)).reshape(users, count, 12)
        return self.out(F.silu(x))


class Target(nn.Module):
    """Attention of several heads of each candidate over a history."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))

    def forward(self, item: torch.Tensor, history: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = lambda x: x.unflatten(-1, (H, D // H)).transpose(1, 2)  # noqa: E731
        scores = heads(self.q(item)) @ heads(self.k(history)).transpose(-1, -2) / 2.0
        scores = torch.where(mask[:, None, None, :] > 0, scores, float("-inf"))
        seen = (scores.softmax(-1) @ heads(self.v(history))).transpose(1, 2).flatten(2)
        return self.out(seen) + item


class MixtureOfLogits(nn.Module):
    """Products of several user and item vectors, mixed by a gate of user, item and products."""

    def __init__(self) -> None:
        super().__init__()
        gate = lambda width: nn.Sequential(nn.Linear(width, 6), nn.SiLU(), nn.Linear(6, 12))  # noqa: E731
        self.user, self.item = nn.Linear(D, 3 * 4), nn.Linear(D, 4 * 4)
        self.of_user, self.of_item, self.of_both = gate(D), gate(D), gate(12)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        users, count, _ = item.shape
        u = F.normalize(self.user(query).view(users, 3, 4), dim=-1)
        i = F.normalize(self.item(item).view(users, count, 4, 4), dim=-1)
        both = torch.einsum("qud,qkid->qkui", u, i).reshape(users, count, 12)
        gate = self.of_user(query).unsqueeze(1) * self.of_item(item) + self.of_both(both)
        return (F.silu(gate).softmax(-1) * both).sum(-1, keepdim=True) / 0.05


class Dcn(nn.Module):
    """DCN-v2: crosses of all features in parallel to a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.crosses = nn.ModuleList([nn.Linear(2 * D, 2 * D) for _ in range(2)])
        self.deep = nn.Sequential(nn.Linear(2 * D, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
        self.out = nn.Linear(2 * D + 6, 2)

    def forward(self, query: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        first = torch.cat([query.unsqueeze(1).expand(-1, item.shape[1], -1), item], -1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.out(torch.cat([x, self.deep(first)], -1))


class DeepFm(nn.Module):
    """A factorisation machine in parallel to a deep part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * D, 1)
        self.deep = nn.Sequential(nn.Linear(2 * D, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 1))

    def forward(self, query: torch.Tensor, item: torch.Tensor, popularity: torch.Tensor) -> torch.Tensor:
        fields = torch.stack([query.unsqueeze(1).expand(-1, item.shape[1], -1), item], 2)
        pairs = 0.5 * (fields.sum(2) ** 2 - (fields**2).sum(2)).sum(-1, keepdim=True)
        return self.linear(fields.flatten(2)) + pairs + self.deep(fields.flatten(2)) + popularity.unsqueeze(-1)


def numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns numbers with a short form in JSON."""
    return (random.integers(-96, 97, size=shape) / 64).astype(np.float32)


def mask(rows: int) -> np.ndarray:
    """Histories of different lengths, padded on the left."""
    return np.array([[float(s >= n % S) for s in range(S)] for n in range(rows)], dtype=np.float32)


def models(random: np.random.Generator) -> dict[str, tuple[nn.Module, dict[str, tuple[bool, np.ndarray]]]]:
    """Returns each model with its inputs, and whether each row has its own input."""
    history = lambda rows: numbers(random, rows, S, D)  # noqa: E731
    tower = lambda: {"history": (True, history(ROWS)), "mask": (True, mask(ROWS))}  # noqa: E731
    query, item = (False, numbers(random, 1, D)), (True, numbers(random, 1, ROWS, D))
    of_user = {"history": (False, history(1)), "mask": (False, mask(3)[2:])}
    return {
        "sasrec": (SasRec(), tower()),
        "pooled": (Pooled(), tower()),
        "encoder": (Encoder(), tower()),
        "din": (Din(), {"query": query, "item": item} | of_user),
        "target": (Target(), {"item": item} | of_user),
        "mixture_of_logits": (MixtureOfLogits(), {"query": query, "item": item}),
        "dcn": (Dcn(), {"query": query, "item": item}),
        "deepfm": (DeepFm(), {"query": query, "item": item, "popularity": (True, numbers(random, 1, ROWS))}),
    }


def exported(name: str, model: nn.Module, inputs: dict[str, tuple[bool, np.ndarray]]) -> onnx.ModelProto:
    """Returns the graph of a model with dynamic axes for users and candidates."""
    users, candidates = torch.export.Dim("Q", min=1, max=512), torch.export.Dim("K0", min=1, max=10_000)
    # Axes of size 1 would be exported as constants.
    several = {n: np.repeat(x, 3, axis=0) if x.shape[0] == 1 else x for n, (_, x) in inputs.items()}
    is_overarch = "item" in inputs
    open_axes = {n: {0: users} | ({1: candidates} if pair and is_overarch else {}) for n, (pair, _) in inputs.items()}
    program = torch.onnx.export(
        model.eval(),
        kwargs={n: torch.from_numpy(x) for n, x in several.items()},
        dynamo=True,
        dynamic_shapes=open_axes,
        opset_version=18,
        input_names=list(inputs),
        output_names=["out"],
        verbose=False,
    )
    graph = program.model_proto
    del graph.metadata_props[:]
    del graph.functions[:]
    del graph.graph.value_info[:]
    for part in [*graph.graph.node, *graph.graph.input, *graph.graph.output, graph.graph]:
        del part.metadata_props[:]
        part.doc_string = ""
    graph.graph.name = name
    return graph


def operators(random: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, tuple[bool, np.ndarray]]]:
    """Returns one output for each operator of the table, over `x` [Q, 3, 4], `y` [Q, 4] and `z` [Q, 3, 4] of 0 and 1."""
    nodes, constants, outputs = [], [], []

    def constant(value: np.ndarray) -> str:
        name = f"c{len(constants)}"
        constants.append(numpy_helper.from_array(value, name))
        return name

    def made(operator: str, *inputs: str | np.ndarray, results: int = 1, **attributes: object) -> str:
        names = [x if isinstance(x, str) else constant(x) for x in inputs]
        own = [f"v{len(nodes)}_{n}" for n in range(results)]
        nodes.append(helper.make_node(operator, names, own, **attributes))
        return own[-1]

    def kept(name: str) -> None:
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))

    f = lambda *values: np.array(values, dtype=np.float32)  # noqa: E731
    i = lambda *values: np.array(values, dtype=np.int64)  # noqa: E731
    scalar = lambda value: np.array(value, dtype=np.float32)  # noqa: E731
    w = lambda *shape: numbers(random, *shape)  # noqa: E731
    for operator in ["Relu", "Sigmoid", "Tanh", "Exp", "Abs", "Neg", "Erf", "Softplus", "Elu", "HardSigmoid", "HardSwish", "Mish"]:
        kept(made(operator, "x"))
    positive = made("Add", made("Abs", "x"), scalar(0.5))
    for operator in ["Log", "Sqrt", "Reciprocal"]:
        kept(made(operator, positive))
    for exponent in [0.5, 2.0, 3.0, -1.0]:
        kept(made("Pow", positive, scalar(exponent)))
    y = made("Unsqueeze", "y", i(1))
    for operator in ["Add", "Sub", "Mul", "Max", "Min"]:
        kept(made(operator, "x", y))
    kept(made("Div", "x", positive))
    kept(made("Sum", "x", y, w(3, 1)))
    for operator in ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"]:
        kept(made("Cast", made(operator, "x", y), to=TensorProto.FLOAT))
    truth, other = made("Cast", "z", to=TensorProto.BOOL), made("Greater", "x", y)
    for operator in ["And", "Or", "Xor"]:
        kept(made("Cast", made(operator, truth, other), to=TensorProto.FLOAT))
    kept(made("Cast", made("Not", truth), to=TensorProto.FLOAT))
    kept(made("Where", truth, "x", y))
    kept(made("Softmax", made("Where", truth, "x", scalar(-1e9)), axis=-1))
    kept(made("Cast", made("IsNaN", made("Log", "x")), to=TensorProto.FLOAT))
    kept(made("Cast", made("Cast", "x", to=TensorProto.INT64), to=TensorProto.FLOAT))
    kept(made("MatMul", "x", w(4, 5)))
    kept(made("MatMul", "x", made("Transpose", "x", perm=[0, 2, 1])))
    kept(made("MatMul", w(2, 3), "x"))
    kept(made("Gemm", "y", w(5, 4), w(5), transB=1, alpha=0.5, beta=2.0))
    kept(made("Einsum", "x", "y", equation="qsd,qd->qs"))
    kept(made("Einsum", "x", w(4, 2, 3), equation="qsd,dhe->qhse"))
    kept(made("LeakyRelu", "x", alpha=0.1))
    kept(made("PRelu", "x", f(0.1, 0.2, 0.3, 0.4)))
    kept(made("Clip", "x", scalar(-0.5), scalar(0.75)))
    kept(made("LayerNormalization", "x", w(4), w(4), axis=-1))
    kept(made("BatchNormalization", "x", w(3), w(3), w(3), np.abs(w(3)) + 1))
    kept(made("LogSoftmax", "x", axis=1))
    for operator in ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"]:
        kept(made(operator, "x", i(1), keepdims=0))
        kept(made(operator, "x", i(-1, 1), keepdims=1))
    kept(made("Concat", "x", "z", "x", axis=1))
    kept(made("Split", "x", i(1, 3), axis=2, results=2))
    kept(made("Slice", "x", i(1), i(4), i(2), i(2)))
    kept(made("Gather", "x", np.array([[2, 0], [1, 1]], dtype=np.int64), axis=1))
    kept(made("Gather", "x", np.array(-1, dtype=np.int64), axis=2))
    kept(made("Transpose", "x", perm=[2, 0, 1]))
    kept(made("Tile", "x", i(1, 2, 1)))
    kept(made("Trilu", made("MatMul", "x", made("Transpose", "x", perm=[0, 2, 1])), upper=0))
    kept(made("Flatten", "x", axis=1))
    kept(made("Squeeze", y, i(1)))
    rows = made("Shape", "x", end=1)
    kept(made("Expand", y, made("Concat", rows, i(3), i(4), axis=0)))
    kept(made("Reshape", "x", made("Concat", rows, i(2), i(6), axis=0)))
    # Rows and heads along one axis, as exporters write attention; and rows that are not on the first axis.
    merged = made("Reshape", made("Transpose", made("Reshape", "x", i(-1, 3, 2, 2)), perm=[0, 2, 1, 3]), i(-1, 3, 2))
    scores = made("Softmax", made("MatMul", merged, made("Transpose", merged, perm=[0, 2, 1])), axis=-1)
    seen = made("Reshape", made("MatMul", scores, merged), i(-1, 2, 3, 2))
    kept(made("Reshape", made("Transpose", seen, perm=[0, 2, 1, 3]), i(-1, 12)))
    flat = made("Reshape", made("Transpose", "x", perm=[1, 0, 2]), i(-1, 4))
    back = made("Reshape", made("Gemm", flat, w(4, 4)), i(3, -1, 4))
    kept(made("Transpose", back, perm=[1, 0, 2]))
    filled = made("ConstantOfShape", made("Concat", rows, i(2), axis=0), value=numpy_helper.from_array(f(0.25)))
    kept(made("Concat", filled, "y", axis=1))
    shaped = lambda name, *sizes: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["Q", *sizes])  # noqa: E731
    graph = helper.make_graph(nodes, "operators", [shaped("x", 3, 4), shaped("y", 4), shaped("z", 3, 4)], outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    truths = (numbers(random, ROWS, 3, 4) > 0).astype(np.float32)
    inputs = {"x": numbers(random, ROWS, 3, 4), "y": numbers(random, ROWS, 4), "z": truths}
    return model, {name: (True, x) for name, x in inputs.items()}


def sequences(random: np.random.Generator) -> tuple[onnx.ModelProto, dict[str, tuple[bool, np.ndarray]]]:
    """Returns recurrent layers over `x` [Q, 4, 3], with initial states `h` [Q, 2, 6] and lengths from `mask` [Q, 4]."""
    nodes, constants, outputs = [], [], []
    steps, depth, hidden = 4, 3, 6
    axis = numpy_helper.from_array(np.array([1], dtype=np.int64), "axis")
    nodes.append(helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0, 2]))
    nodes.append(helper.make_node("Transpose", ["h"], ["states"], perm=[1, 0, 2]))
    nodes.append(helper.make_node("ReduceSum", ["mask", "axis"], ["count"], keepdims=0))
    nodes.append(helper.make_node("Cast", ["count"], ["lengths"], to=TensorProto.INT32))

    def layer(operator: str, gates: int, direction: str, has_states: bool, has_lengths: bool, **attributes: object) -> None:
        n = len(nodes)
        directions = 2 if direction == "bidirectional" else 1
        rows = gates * hidden
        for name, shape in {"w": (rows, depth), "r": (rows, hidden), "b": (2 * rows,)}.items():
            constants.append(numpy_helper.from_array(numbers(random, directions, *shape), f"{name}{n}"))
        inputs = ["turned", f"w{n}", f"r{n}", f"b{n}", "lengths" if has_lengths else ""]
        inputs += ["states"] * (2 if operator == "LSTM" else 1) if has_states else []
        made = [f"y{n}", f"last{n}", f"cell{n}"][: 3 if operator == "LSTM" else 2]
        nodes.append(helper.make_node(operator, inputs, made, hidden_size=hidden, direction=direction, **attributes))
        outputs.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made)

    for has_lengths in [False, True]:
        layer("RNN", 1, "reverse", False, has_lengths)
        layer("LSTM", 4, "bidirectional", True, has_lengths)
        layer("GRU", 3, "bidirectional", True, has_lengths, linear_before_reset=1)
        layer("GRU", 3, "forward", False, has_lengths)
    shaped = lambda name, *sizes: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["Q", *sizes])  # noqa: E731
    given = [shaped("x", steps, depth), shaped("h", 2, hidden), shaped("mask", steps)]
    graph = helper.make_graph(nodes, "recurrent", given, outputs, [axis, *constants])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    lengths = np.array([[float(s <= n % steps) for s in range(steps)] for n in range(ROWS)], dtype=np.float32)
    inputs = {"x": numbers(random, ROWS, steps, depth), "h": numbers(random, ROWS, 2, hidden), "mask": lengths}
    return model, {name: (True, x) for name, x in inputs.items()}


def case(out: Path, name: str, model: onnx.ModelProto, inputs: dict[str, tuple[bool, np.ndarray]]) -> dict[str, object]:
    """Writes a graph; returns its inputs and the outputs of onnxruntime."""
    path = out / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    made = session.run(None, {n: x for n, (_, x) in inputs.items()})
    short = lambda x: [float(f"{v:.8g}") for v in x.ravel().tolist()]  # noqa: E731
    return {
        "graph": name,
        "inputs": [
            {"name": n, "is_pair": pair, "shape": list(x.shape), "values": short(x)} for n, (pair, x) in inputs.items()
        ],
        "outputs": [
            {"name": o.name, "shape": list(x.shape), "values": short(x)} for o, x in zip(session.get_outputs(), made)
        ],
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/dense")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(SEED)
    random = np.random.default_rng(SEED)
    cases = [case(out, "operators", *operators(random))]
    for name, (model, inputs) in models(random).items():
        cases.append(case(out, name, exported(name, model, inputs), inputs))
    (out / "cases.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")
    cases = [case(out, "recurrent", *sequences(np.random.default_rng(SEED)))]
    (out / "sequences.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
