"""Writes the tiny model package of the tests: python/make_test_graphs.py [OUT=tests/golden/tiny]

OUT receives model.toml, user.onnx, item.onnx, overarch.onnx, tables.safetensors and sections.txt, which make a package that can
be published; users.onnx, whose tower returns two queries per user; wrong_*.onnx, which must be rejected; and cases.json: inputs
of each graph with the outputs of onnxruntime. items.jsonl is its catalogue and answers.json the expected answers of the complete
pass to some requests, computed here item by item. Everything is derived from SEED.

Needs numpy, onnx, onnxruntime and safetensors.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

SEED = 7
D, T = 4, 2
PACKAGES, SECTIONS = 12, ["admin", "games", "python", "zürich"]
WIDTH_PACKAGES, WIDTH_SECTIONS, WIDTH_SIZE = 4, 2, 3
HIDDEN = 6

MODEL = """\
# Written by python/make_test_graphs.py.
name = "tiny"
description = "The package of the tests."
dimension = 4

[[tables]]
name = "packages"
file = "tables.safetensors"
unseen = "zero"

[[tables]]
name = "sections"
file = "tables.safetensors"
unseen = "row:0"
vocabulary = "sections.txt"

[user]
tower = "user.onnx"

[[user.features]]
name = "installed"
kind = "ids"
table = "packages"
pooling = "sum"
max_ids = 8

[[user.features]]
name = "section"
kind = "category"
table = "sections"
pooling = "mean"

[[user.features]]
name = "size"
kind = "dense"
width = 3

[item]
tower = "item.onnx"

[[item.features]]
name = "package"
kind = "ids"
table = "packages"
pooling = "sum"
column = "id"

[[item.features]]
name = "section"
kind = "category"
table = "sections"
pooling = "sum"

[[item.columns]]
name = "section"

[[item.columns]]
name = "popularity"

[[item.columns]]
name = "title"
filter = false

[[tasks]]
name = "click"

[[tasks]]
name = "buy"

[overarch]
graph = "overarch.onnx"

[value]
expression = "click + w_buy * buy + if(popularity > 2, 0.01, 0) + 0.1 * similarity"

[value.constants]
w_buy = 2.0
"""


def rounded(values):
    """Multiples of 1/16: sums of products of few of them are exact in f32 in any order."""
    return (np.round(values * 16) / 16).astype(np.float32)


class Builder:
    """Collects nodes and weights of a graph."""

    def __init__(self, rng):
        self.rng, self.nodes, self.weights, self.made = rng, [], [], 0

    def weight(self, *shape):
        self.made += 1
        name = f"w{self.made}"
        self.weights.append(numpy_helper.from_array(rounded(self.rng.normal(size=shape) * 0.5), name))
        return name

    def numbers(self, values):
        self.made += 1
        name = f"n{self.made}"
        self.weights.append(numpy_helper.from_array(np.array(values, dtype=np.int64), name))
        return name

    def node(self, operator, inputs, output=None, **attributes):
        self.made += 1
        output = output or f"t{self.made}"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=f"{operator.lower()}{self.made}", **attributes))
        return output

    def layer(self, x, columns_in, columns_out, output=None):
        """x W + b over the last dimension, for any rank."""
        return self.node("Add", [self.node("MatMul", [x, self.weight(columns_in, columns_out)]), self.weight(columns_out)], output)

    def save(self, path, inputs, outputs, check=True):
        ports = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in side.items()] for side in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, path.stem, *ports, initializer=self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="sterling")
        if check:
            onnx.checker.check_model(model, full_check=True)
        path.write_bytes(model.SerializeToString(deterministic=True))


def unit(b, x, output):
    """x / sqrt(sum of squares + epsilon), in operators that every runtime supports."""
    b.weights.append(numpy_helper.from_array(np.array([1e-6], dtype=np.float32), "epsilon"))
    squares = b.node("ReduceSum", [b.node("Mul", [x, x]), b.numbers([-1])], keepdims=1)
    return b.node("Div", [x, b.node("Sqrt", [b.node("Add", [squares, "epsilon"])])], output)


def tower(path, rng, inputs, output, queries=None):
    b = Builder(rng)
    columns = sum(inputs.values())
    x = b.node("Concat", list(inputs), axis=1)
    x = b.node("Relu", [b.layer(x, columns, HIDDEN)])
    if queries is None:
        unit(b, b.layer(x, HIDDEN, D), output)
    else:
        unit(b, b.node("Reshape", [b.layer(x, HIDDEN, queries * D), b.numbers([-1, queries, D])]), output)
    shape = ["Q", D] if queries is None else ["Q", queries, D]
    b.save(path, {n: ["Q", w] for n, w in inputs.items()}, {output: shape})


def overarch(path, rng):
    """Layers over [query * item, query, item, popularity]; the query is spread over its candidates."""
    b = Builder(rng)
    query = b.node("Unsqueeze", ["query", b.numbers([1])])
    product = b.node("Mul", [query, "item"])
    spread = b.node("Expand", [query, b.node("Shape", ["item"])])
    column = b.node("Unsqueeze", ["popularity", b.numbers([2])])
    x = b.node("Concat", [product, spread, "item", column], axis=2)
    x = b.node("Relu", [b.layer(x, 3 * D + 1, HIDDEN)])
    b.layer(x, HIDDEN, T, "logits")
    b.save(path, {"query": ["Q", D], "item": ["Q", "K0", D], "popularity": ["Q", "K0"]}, {"logits": ["Q", "K0", T]})


def wrong(out, rng):
    """Writes graphs that must be rejected, each for one reason."""
    b = Builder(rng)
    b.node("Frobnicate", ["size"], "query")
    b.save(out / "wrong_operator.onnx", {"size": ["Q", 3]}, {"query": ["Q", 3]}, check=False)
    b = Builder(rng)
    b.node("Cast", ["size"], "query", to=TensorProto.INT64)
    size = helper.make_tensor_value_info("size", TensorProto.FLOAT, ["Q", 3])
    query = helper.make_tensor_value_info("query", TensorProto.INT64, ["Q", 3])
    graph = helper.make_graph(b.nodes, "wrong_type", [size], [query])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, producer_name="sterling")
    (out / "wrong_type.onnx").write_bytes(model.SerializeToString(deterministic=True))
    # The declared shape hides that the graph only runs for three rows.
    b = Builder(rng)
    b.node("Reshape", ["size", b.numbers([3, 3])], "query")
    b.save(out / "wrong_rows.onnx", {"size": ["Q", 3]}, {"query": ["R", 3]}, check=False)


def cases(out, rng):
    """Returns inputs of each graph with the outputs of onnxruntime."""
    shapes = {
        "user": {"installed": [3, WIDTH_PACKAGES], "section": [3, WIDTH_SECTIONS], "size": [3, WIDTH_SIZE]},
        "users": {"installed": [2, WIDTH_PACKAGES], "section": [2, WIDTH_SECTIONS]},
        "item": {"package": [5, WIDTH_PACKAGES], "section": [5, WIDTH_SECTIONS]},
        "overarch": {"query": [2, D], "item": [2, 3, D], "popularity": [2, 3]},
    }
    written = []
    for graph, inputs in shapes.items():
        session = onnxruntime.InferenceSession(out / f"{graph}.onnx", providers=["CPUExecutionProvider"])
        given = {name: rounded(rng.normal(size=shape)) for name, shape in inputs.items()}
        name = session.get_outputs()[0].name
        made = session.run([name], given)[0]
        tensor = lambda n, a: {"name": n, "shape": list(a.shape), "values": [float(np.float32(x)) for x in a.reshape(-1)]}
        written.append({"graph": graph, "inputs": [tensor(n, a) for n, a in given.items()], "output": tensor(name, made)})
    write_list(out / "cases.json", written)


def write_list(path, entries):
    """Writes a JSON list with one entry per line."""
    path.write_text("[\n" + ",\n".join(json.dumps(e, ensure_ascii=False) for e in entries) + "\n]\n")


def catalogue(out):
    """Returns items whose ids are rows of `packages`, except the last, which is beyond the table."""
    items = []
    for n in range(PACKAGES + 1):
        id = n if n < PACKAGES else 1_000_000
        items.append({"id": id, "attributes": {"section": SECTIONS[n % len(SECTIONS)], "popularity": n * 3 % 7 / 2, "title": f"package {n}"}})
    (out / "items.jsonl").write_text("".join(json.dumps(i, ensure_ascii=False) + "\n" for i in items))
    return items


def answers(out, tables, items):
    """Computes the complete pass over every item for some requests: value model, tasks and order."""
    packages, sections = (t.astype(np.float32) for t in (tables["packages"], tables["sections"]))
    session = {g: onnxruntime.InferenceSession(out / f"{g}.onnx", providers=["CPUExecutionProvider"]) for g in ("user", "item", "overarch")}
    pooled = lambda ids: sum((packages[i] for i in ids if 0 <= i < PACKAGES), np.zeros(WIDTH_PACKAGES, np.float32))
    section = lambda names: np.mean([sections[SECTIONS.index(n) if n in SECTIONS else 0] for n in names], axis=0) if names else np.zeros(WIDTH_SECTIONS, np.float32)
    inputs = {"package": np.stack([pooled([i["id"]]) for i in items]), "section": np.stack([section([i["attributes"]["section"]]) for i in items])}
    rows = session["item"].run(["item"], inputs)[0]
    popularity = np.array([i["attributes"]["popularity"] for i in items], np.float32)
    written = []
    for features, constants in [
        ({"installed": [1, 5, 7], "section": "python", "size": [0.5, -1.0, 2.0]}, {}),
        ({"installed": [1, 5, 7], "section": "python", "size": [0.5, -1.0, 2.0]}, {"w_buy": -1.5}),
        ({"installed": [3, 3, 999], "section": ["games", "zürich"]}, {}),
        ({"installed": [], "section": "never seen", "size": [0.0, 0.0, 1.0]}, {}),
        ({}, {}),
    ]:
        names = features.get("section", [])
        given = {
            "installed": pooled(features.get("installed", []))[None],
            "section": section([names] if isinstance(names, str) else names)[None],
            "size": np.array([features.get("size", [0.0] * WIDTH_SIZE)], np.float32),
        }
        query = session["user"].run(["query"], {n: v.astype(np.float32) for n, v in given.items()})[0]
        similarity = rows @ query[0]
        logits = session["overarch"].run(["logits"], {"query": query, "item": rows[None], "popularity": popularity[None]})[0][0]
        click, buy = (1 / (1 + np.exp(-logits))).T
        value = click + constants.get("w_buy", 2.0) * buy + np.where(popularity > 2, 0.01, 0) + 0.1 * similarity
        order = sorted(range(len(items)), key=lambda n: (-value[n], items[n]["id"]))
        found = [{"id": items[n]["id"], "score": float(value[n]), "tasks": {"click": float(click[n]), "buy": float(buy[n])}, "similarity": float(similarity[n])} for n in order]
        written.append({"features": features, "constants": constants, "query": [float(x) for x in query[0]], "items": found})
    write_list(out / "answers.json", written)


def main():
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/tiny")
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    tables = {
        "packages": rounded(rng.normal(size=(PACKAGES, WIDTH_PACKAGES))),
        "sections": rounded(rng.normal(size=(len(SECTIONS), WIDTH_SECTIONS))).astype(np.float16),
    }
    save_file(tables, out / "tables.safetensors")
    (out / "sections.txt").write_text("".join(s + "\n" for s in SECTIONS))
    (out / "model.toml").write_text(MODEL)
    tower(out / "user.onnx", rng, {"installed": WIDTH_PACKAGES, "section": WIDTH_SECTIONS, "size": WIDTH_SIZE}, "query")
    tower(out / "users.onnx", rng, {"installed": WIDTH_PACKAGES, "section": WIDTH_SECTIONS}, "query", queries=2)
    tower(out / "item.onnx", rng, {"package": WIDTH_PACKAGES, "section": WIDTH_SECTIONS}, "item")
    overarch(out / "overarch.onnx", rng)
    wrong(out, rng)
    cases(out, rng)
    answers(out, tables, catalogue(out))


if __name__ == "__main__":
    main()
