"""Writes golden gradients for the tests of compiled graphs: python/make_grad_golden.py [OUT=tests/golden/train]

OUT/optimizers.json holds parameters after 20 steps of torch.optim in f32.

OUT/gradients.json holds inputs, gradients of the outputs, and the gradients that PyTorch's autograd computes from them in f64, for all
inputs and all constants with at least one axis. Its graphs are those of python/make_dense_golden.py, and the towers and rerankers of the
packages in models/. OUT/tasks.json holds the loss of rerankers' logits against labels, and its gradients. Packages contain only ONNX files, so a small evaluator runs each node by torch functions. A reranker occurs twice: as
served, with one user and several candidates, and per event, with one user and one candidate per row.

Numbers are f32 as hexadecimal digits of their little-endian bytes. Large gradients keep every `step`th number. All random
numbers derive from SEED. Needs numpy, onnx and torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import numpy_helper

SEED = 11
ROWS = 3
KEPT = 256
ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["dcn", "debian", "deepfm", "din", "hstu", "mol", "sasrec", "tags"]
# Inputs of small integers, which graphs compare for equality.
INTEGERS = {"installed_lists", "section_lists", "maintainer_lists", "number"}
# Inputs whose logarithm graphs compute.
POSITIVE = {"price", "popularity"}


def broadcast_to(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, tuple(shape)))


def sliced(x: torch.Tensor, starts: Any, ends: Any, axes: Any = None, steps: Any = None) -> torch.Tensor:
    axes = range(len(starts)) if axes is None else axes.tolist()
    steps = [1] * len(starts) if steps is None else steps.tolist()
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), axes, steps):
        index = torch.arange(x.shape[axis])[start : end if end < x.shape[axis] else None : step]
        x = x.index_select(axis, index)
    return x


def reshaped(x: torch.Tensor, shape: Any) -> torch.Tensor:
    return x.reshape([x.shape[n] if size == 0 else size for n, size in enumerate(shape.tolist())])


def reduced(operator: str, x: torch.Tensor, axes: list[int] | None, keep: bool) -> torch.Tensor:
    axes = list(range(x.dim())) if axes is None else axes
    return {
        "ReduceSum": lambda: x.sum(axes, keepdim=keep),
        "ReduceMean": lambda: x.mean(axes, keepdim=keep),
        "ReduceMax": lambda: x.amax(axes, keepdim=keep),
        "ReduceMin": lambda: x.amin(axes, keepdim=keep),
        "ReduceL1": lambda: x.abs().sum(axes, keepdim=keep),
        "ReduceL2": lambda: torch.linalg.vector_norm(x, dim=axes, keepdim=keep),
        "ReduceSumSquare": lambda: (x * x).sum(axes, keepdim=keep),
        "ReduceLogSumExp": lambda: torch.logsumexp(x, axes, keepdim=keep),
    }[operator]()


def clamped(x: torch.Tensor, least: Any = None, most: Any = None) -> torch.Tensor:
    x = x if least is None else torch.clamp(x, min=least.detach().reshape(())) if not least.requires_grad else torch.maximum(x, least)
    return x if most is None else torch.clamp(x, max=most.detach().reshape(()))


def joined(function: Any) -> Any:
    def of_all(*values: torch.Tensor) -> torch.Tensor:
        made = values[0]
        for value in values[1:]:
            made = function(made, value)
        return made

    return of_all


PLAIN = {
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Exp": torch.exp, "Log": torch.log, "Sqrt": torch.sqrt,
    "Abs": torch.abs, "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Erf": torch.erf, "Softplus": F.softplus, "Mish": F.mish,
    "HardSwish": F.hardswish, "Not": torch.logical_not, "IsNaN": torch.isnan, "MatMul": torch.matmul, "Where": torch.where,
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow, "Equal": torch.eq, "Less": torch.lt,
    "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and, "Or": torch.logical_or,
    "Xor": torch.logical_xor, "Max": joined(torch.maximum), "Min": joined(torch.minimum), "Sum": joined(torch.add),
    "Slice": sliced, "Reshape": reshaped, "Clip": clamped,
}  # fmt: skip


def evaluated(node: onnx.NodeProto, x: list[Any]) -> Any:
    """Returns the output of a node for its inputs; a list if it has several outputs."""
    a = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    operator = node.op_type
    if operator in PLAIN:
        return PLAIN[operator](*x)
    if operator.startswith("Reduce"):
        axes = x[1].tolist() if len(x) > 1 and x[1] is not None else a.get("axes")
        return reduced(operator, x[0], axes, a.get("keepdims", 1) != 0)
    if operator == "Constant":
        return torch.from_numpy(np.array(numpy_helper.to_array(a["value"]))) if "value" in a else torch.tensor(next(iter(a.values())))
    if operator == "Cast":
        kinds = {1: torch.float64, 7: torch.int64, 9: torch.bool, 6: torch.int32, 11: torch.float64}
        return x[0].to(kinds[a["to"]])
    if operator == "Gemm":
        left, right = (x[0].T if a.get("transA") else x[0]), (x[1].T if a.get("transB") else x[1])
        product = a.get("alpha", 1.0) * (left @ right)
        return product + a.get("beta", 1.0) * x[2] if len(x) > 2 else product
    if operator == "Shape":
        return torch.tensor(list(x[0].shape))[a.get("start", 0) : a.get("end")]
    if operator == "Gather":
        axis, index = a.get("axis", 0) % x[0].dim(), x[1] % x[0].shape[a.get("axis", 0)]
        return x[0].index_select(axis, index.reshape(-1)).reshape([*x[0].shape[:axis], *index.shape, *x[0].shape[axis + 1 :]])
    if operator == "Split":
        sizes = x[1].tolist() if len(x) > 1 else [x[0].shape[a.get("axis", 0)] // len(node.output)] * len(node.output)
        return list(torch.split(x[0], sizes, a.get("axis", 0)))
    if operator == "Trilu":
        return (torch.triu if a.get("upper", 1) else torch.tril)(x[0], int(x[1]) if len(x) > 1 else 0)
    if operator == "BatchNormalization":
        shape = [1, -1] + [1] * (x[0].dim() - 2)
        scale, bias, mean, variance = (v.reshape(shape) for v in x[1:5])
        return (x[0] - mean) / torch.sqrt(variance + a.get("epsilon", 1e-5)) * scale + bias
    if operator == "LayerNormalization":
        axes = list(range(a.get("axis", -1) % x[0].dim(), x[0].dim()))
        centred = x[0] - x[0].mean(axes, keepdim=True)
        normal = centred / torch.sqrt((centred**2).mean(axes, keepdim=True) + a.get("epsilon", 1e-5)) * x[1]
        return normal + x[2] if len(x) > 2 else normal
    if operator == "Unsqueeze":
        for axis in sorted(n % (x[0].dim() + len(x[1])) for n in x[1].tolist()):
            x[0] = x[0].unsqueeze(axis)
        return x[0]
    if operator == "Squeeze":
        return x[0].squeeze(tuple(x[1].tolist())) if len(x) > 1 else x[0].squeeze()
    return {
        "Concat": lambda: torch.cat(x, a["axis"]),
        "Transpose": lambda: x[0].permute(a["perm"]) if "perm" in a else x[0].permute(*reversed(range(x[0].dim()))),
        "Expand": lambda: broadcast_to(x[0], x[1].tolist()),
        "Softmax": lambda: torch.softmax(x[0], a.get("axis", -1)),
        "LogSoftmax": lambda: torch.log_softmax(x[0], a.get("axis", -1)),
        "Elu": lambda: F.elu(x[0], a.get("alpha", 1.0)),
        "HardSigmoid": lambda: torch.clamp(x[0] * a.get("alpha", 0.2) + a.get("beta", 0.5), 0, 1),
        "LeakyRelu": lambda: F.leaky_relu(x[0], a.get("alpha", 0.01)),
        "PRelu": lambda: torch.where(x[0] > 0, x[0], x[0] * x[1]),
        "Einsum": lambda: torch.einsum(a["equation"].decode(), *x),
        "Gelu": lambda: F.gelu(x[0]),
        "Tile": lambda: x[0].repeat(x[1].tolist()),
        "Flatten": lambda: x[0].flatten(1),
        "ConstantOfShape": lambda: torch.full(x[0].tolist(), float(numpy_helper.to_array(a["value"])[0]), dtype=torch.float64),
    }[operator]()


def run(
    graph: onnx.GraphProto, inputs: dict[str, torch.Tensor], weights: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the outputs of a graph, and its trainable constants: those with an axis, or named like a module's parameter.

    ``weights`` replace constants of these names.
    """
    known: dict[str, Any] = dict(inputs)
    learned = {}
    wide = lambda value: value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value  # noqa: E731
    for tensor in graph.initializer:
        value = wide(torch.from_numpy(np.array(numpy_helper.to_array(tensor))))
        if value.dtype == torch.float64 and (value.dim() > 0 or ("." in tensor.name and "::" not in tensor.name)):
            learned[tensor.name] = value.requires_grad_()
        known[tensor.name] = (weights or {}).get(tensor.name, value)
    for node in graph.node:
        made = evaluated(node, [known[name] if name else None for name in node.input])
        for name, value in zip(node.output, made if isinstance(made, list) else [made]):
            known[name] = wide(value)
    return {output.name: known[output.name] for output in graph.output}, learned


def digits(x: torch.Tensor | np.ndarray) -> str:
    """The f32 numbers as hexadecimal digits of their little-endian bytes."""
    array = x.detach().numpy() if isinstance(x, torch.Tensor) else x
    return np.ascontiguousarray(array).astype("<f4").tobytes().hex()


def kept(name: str, gradient: torch.Tensor) -> dict[str, Any]:
    flat = gradient.detach().reshape(-1)
    # Odd, so that it samples all columns.
    step = 1 if len(flat) <= KEPT else (len(flat) // KEPT) | 1
    return {"name": name, "shape": list(gradient.shape), "step": step, "largest": float(flat.abs().max()), "values": digits(flat[::step])}


def case(path: Path, inputs: dict[str, tuple[bool, np.ndarray]], axis: int, random: np.random.Generator) -> dict[str, Any]:
    """Returns the gradients of a graph; each input comes with a flag whether it has values per row, counted by axis `axis`."""
    graph = onnx.load(path).graph
    given = {name: torch.from_numpy(x).double().requires_grad_() for name, (_, x) in inputs.items()}
    outputs, learned = run(graph, given)
    worth = {name: torch.from_numpy(random.normal(size=tuple(made.shape)).astype(np.float32)) for name, made in outputs.items()}
    total = sum((made * worth[name].double()).sum() for name, made in outputs.items())
    wanted = given | learned
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    made = {name: torch.zeros_like(wanted[name]) if g is None else g for name, g in zip(wanted, gradients)}
    assert all(bool(g.isfinite().all()) for g in made.values()), (path, [n for n, g in made.items() if not g.isfinite().all()])
    return {
        "graph": str(path.relative_to(ROOT)),
        "axis": axis,
        "inputs": [{"name": n, "is_pair": p, "shape": list(x.shape), "values": digits(x)} for n, (p, x) in inputs.items()],
        "outputs": [{"name": n, "shape": list(x.shape), "values": digits(x)} for n, x in worth.items()],
        "input_gradients": [kept(n, made[n]) for n in given],
        "constant_gradients": [kept(n, made[n]) for n in learned],
    }


def drawn(name: str, shape: list[int], random: np.random.Generator) -> np.ndarray:
    """Returns random numbers in the range of an input."""
    if name.endswith("mask"):
        # Padded at the end; at least one entry is not padding.
        return (np.arange(shape[-1]) < random.integers(1, shape[-1] + 1, size=[*shape[:-1], 1])).astype(np.float32)
    if name in INTEGERS:
        return random.integers(1, 30, size=shape).astype(np.float32)
    made = random.normal(scale=0.7, size=shape).astype(np.float32)
    return np.abs(made) + np.float32(0.1) if name in POSITIVE else made


def package_cases(folder: Path, random: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for file in sorted(folder.glob("*.onnx")):
        inputs = {
            x.name: [d.dim_value or d.dim_param for d in x.type.tensor_type.shape.dim] for x in onnx.load(file).graph.input
        }
        if file.stem != "overarch":
            made = {n: (True, drawn(n, [ROWS, *shape[1:]], random)) for n, shape in inputs.items()}
            cases.append(case(file, made, 0, random))
            continue
        is_pair = {n: len(shape) > 1 and isinstance(shape[1], str) for n, shape in inputs.items()}
        sizes = lambda n, users, each: [users, *([each] if is_pair[n] else []), *inputs[n][2 if is_pair[n] else 1 :]]  # noqa: E731
        cases.append(case(file, {n: (is_pair[n], drawn(n, sizes(n, 1, ROWS), random)) for n in inputs}, 1, random))
        cases.append(case(file, {n: (True, drawn(n, sizes(n, ROWS, 1), random)) for n in inputs}, 0, random))
    return cases


def task_case(package: Path, random: np.random.Generator) -> dict[str, Any]:
    """Returns the loss of a reranker on events, one user and one item each, and its gradients."""
    events, tasks = 70, 2
    graph = onnx.load(package / "overarch.onnx").graph
    attributes = [json.loads(line)["attributes"] for line in (package / "items.jsonl").read_text().splitlines()]
    items = random.integers(0, len(attributes), size=events)
    normal = lambda *shape: torch.from_numpy(random.normal(scale=0.7, size=shape).astype(np.float32))  # noqa: E731
    queries, vectors = normal(events, 16), normal(events, 16)
    labels = torch.from_numpy(random.integers(0, 2, size=(events, tasks)).astype(np.float32))
    weights = torch.from_numpy(random.integers(1, 5, size=events).astype(np.float32))
    of_tasks = torch.tensor([1.0, 0.25])
    given = {"query": queries.double().requires_grad_(), "item": vectors.double().requires_grad_()}
    columns = {x.name: torch.tensor([[float(np.float32(attributes[n][x.name]))] for n in items]).double() for x in graph.input if x.name not in given}
    outputs, learned = run(graph, {"query": given["query"], "item": given["item"][:, None], **columns})
    each = F.binary_cross_entropy_with_logits(outputs["logits"][:, 0], labels.double(), reduction="none")
    loss = (each * of_tasks.double() * (weights / weights.sum()).double()[:, None]).sum()
    wanted = given | learned
    made = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)))
    return {
        "package": package.name,
        "items": items.tolist(),
        "queries": digits(queries),
        "vectors": digits(vectors),
        "labels": digits(labels),
        "weights": digits(weights),
        "tasks": of_tasks.tolist(),
        "loss": float(loss.detach()),
        "gradients": [kept(n, g) for n, g in made.items() if g is not None],
    }


STEPS, NUMBERS = 20, 13
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05, "betas": (0.8, 0.95)}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05}),
}


def optimizer_cases(random: np.random.Generator) -> list[dict[str, Any]]:
    """Returns cases of each rule with and without decay, clipping, and an epsilon large enough to matter."""
    cases = []
    for kind, (rule, settings) in OPTIMIZERS.items():
        for decay, clip, epsilon in [(0.0, None, None), (0.1, 1.5, 1e-2)]:
            own = settings | {"weight_decay": decay} | ({"eps": epsilon} if epsilon and kind != "sgd" else {})
            gradients = random.normal(size=(STEPS, NUMBERS)).astype(np.float32)
            parameter = torch.from_numpy(random.normal(size=NUMBERS).astype(np.float32)).requires_grad_()
            before, optimizer = digits(parameter), rule([parameter], **own)
            for gradient in gradients:
                parameter.grad = torch.from_numpy(gradient.copy())
                if clip:
                    torch.nn.utils.clip_grad_norm_([parameter], clip)
                optimizer.step()
            spec = {"kind": kind, "rate": own["lr"], "decay": decay, "clip": clip}
            spec |= {"betas": own.get("betas", (0.9, 0.999)), "epsilon": own.get("eps")}
            cases.append({"spec": spec, "before": before, "gradients": digits(gradients), "after": digits(parameter)})
    return cases


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "tests/golden/train")
    out.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    cases = []
    dense = ROOT / "tests/golden/dense"
    for known in json.loads((dense / "cases.json").read_text()):
        inputs = {
            i["name"]: (i["is_pair"], np.array(i["values"], dtype=np.float32).reshape(i["shape"])) for i in known["inputs"]
        }
        cases.append(case(dense / f"{known['graph']}.onnx", inputs, int("item" in inputs), random))
    for package in PACKAGES:
        cases += package_cases(ROOT / "models" / package, random)
    (out / "optimizers.json").write_text(json.dumps(optimizer_cases(random), separators=(",", ":")) + "\n")
    tasks = [task_case(ROOT / "models" / package, np.random.default_rng(SEED)) for package in ("dcn", "deepfm")]
    (out / "tasks.json").write_text(json.dumps(tasks, separators=(",", ":")) + "\n")
    (out / "gradients.json").write_text(json.dumps(cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
