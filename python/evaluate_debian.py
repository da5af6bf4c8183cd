#!/usr/bin/env python3
"""Evaluates a model package from its files alone, with onnxruntime, and writes its golden answers.

    python evaluate_debian.py PACKAGE [--data DATA] [--seed 1] [--golden]

PACKAGE is the output of train_debian.py. All data is used as stored: tables in f16, graphs as exported, requests from
heldout.jsonl, features and the value model from model.toml. With DATA (see extract_debian.py) the baselines that need the
training edges are measured as well, on the split of the seed. Writes metrics.json, and with --golden golden.json: answers of
exact search in f32 that a server of the package must return. The first of them are also written as warmup.jsonl, which the server
checks at each load.
"""
import argparse
import json
import pathlib
import tomllib

import numpy as np
import onnxruntime
import pyarrow.parquet as pq
from safetensors.numpy import load_file

import debian_data
from debian_data import recall, top_k, without_history
from sterling.snapshot import decoded

CANDIDATES, DEPTHS, GOLDEN_USERS, WARM_UP_USERS = 2000, (20, 100, 1000), 40, 5
FUNCTIONS = {
    "min": np.minimum, "max": np.maximum, "clamp": np.clip, "log": np.log, "exp": np.exp, "sqrt": np.sqrt,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "if": np.where,
}  # fmt: skip


class Package:
    """A model package: maps requests and items to vectors, and candidates to values."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.spec = tomllib.loads((self.folder / "model.toml").read_text())
        files = {table["file"] for table in self.spec["tables"]}
        stored = {name: tensor for file in sorted(files) for name, tensor in load_file(self.folder / file).items()}
        read = lambda tensor, form: decoded(tensor, form) if form else tensor.astype(np.float32)
        self.tables = {table["name"]: read(stored[table["name"]], table.get("format")) for table in self.spec["tables"]}
        self.rows = {
            table["name"]: {v: n for n, v in enumerate((self.folder / table["vocabulary"]).read_text().splitlines())}
            for table in self.spec["tables"] if "vocabulary" in table
        }  # fmt: skip
        self.tasks = [task["name"] for task in self.spec["tasks"]]
        self.graphs = {
            name: onnxruntime.InferenceSession(self.folder / file, providers=["CPUExecutionProvider"])
            for name, file in (
                ("user", self.spec["user"]["tower"]), ("item", self.spec["item"]["tower"]), ("overarch", self.spec["overarch"]["graph"])
            )
        }  # fmt: skip
        columns = pq.read_table(self.folder / "items.parquet").to_pydict()
        assert columns["id"] == list(range(len(columns["id"]))), "the ids of the demo's items are their positions"
        self.columns = columns

    def _input(self, feature, values):
        """Returns the input of a graph for a feature, for a block of requests or items; None is a missing value."""
        if feature["kind"] == "dense":
            zero = [0.0] * feature["width"]
            return np.array([zero if v is None else v for v in values], np.float32)
        table, rows = self.tables[feature["table"]], self.rows.get(feature["table"])
        length = feature.get("length")
        out = np.zeros((len(values), *([length] if length else []), table.shape[1]), np.float32)
        for n, value in enumerate(values):
            listed = [] if value is None else value if isinstance(value, list) else [value]
            if feature["kind"] == "category":
                listed = [rows.get(str(v), -1) for v in listed]
            if length:
                assert feature["keep"] == "first", "of a long sequence the demo keeps the first values"
                for place, row in enumerate(listed[:length]):
                    out[n, place] = table[row] if 0 <= row < len(table) else 0
                continue
            known = [row for row in listed if 0 <= row < len(table)]
            if known:
                out[n] = table[known].sum(0) if feature["pooling"] == "sum" else table[known].mean(0)
        return out

    def _feed(self, side, graph, values_of):
        """Returns the inputs of a graph for the features of a side."""
        read = {graph_input.name for graph_input in self.graphs[graph].get_inputs()}
        features = [feature for feature in self.spec[side]["features"] if feature["name"] in read]
        return {f["name"]: self._input(f, values_of(f.get("column", f["name"]))) for f in features}

    def _users(self, graph, requests):
        return self._feed("user", graph, lambda name: [request.get(name) for request in requests])

    def queries(self, requests):
        """Returns [Q, D] for the `features` of requests."""
        return self.graphs["user"].run(["query"], self._users("user", requests))[0]

    def items(self, block=4096):
        """Returns the item inputs of the OverArch by name, [N, width]: `item`, and the rows of columns that are looked up."""
        found = []
        for at in range(0, len(self.columns["id"]), block):
            feed = self._feed("item", "item", lambda name: self.columns[name][at : at + block])
            found.append(self.graphs["item"].run(["item"], feed)[0])
        features = self.spec["overarch"].get("features", [])
        looked_up = {f["name"]: self._input(f, self.columns[f.get("column", f["name"])]) for f in features}
        return {"item": np.concatenate(found)} | looked_up

    def logits(self, requests, query, items, candidates):
        """Returns [Q, K0, T] for the `features` of requests, their queries [Q, D] and candidate items [Q, K0]."""
        feed = {"query": query} | {name: vectors[candidates] for name, vectors in items.items()} | self._users("overarch", requests)
        feed["similarity"] = np.einsum("qd,qkd->qk", query, feed["item"])
        read = [graph_input.name for graph_input in self.graphs["overarch"].get_inputs()]
        for name in read:
            if name not in feed:
                feed[name] = np.asarray(self.columns[name], np.float32)[candidates]
        return self.graphs["overarch"].run(["logits"], {name: feed[name] for name in read})[0]

    def value(self, scores, similarity):
        """Evaluates the value model over task scores [Q, K0, T]; its language is a subset of Python's except `if`."""
        expression = self.spec["value"]["expression"].replace("if(", "where(")
        names = FUNCTIONS | {"where": np.where, "similarity": similarity} | self.spec["value"].get("constants", {})
        names |= {task: scores[..., n] for n, task in enumerate(self.tasks)}
        return eval(expression, {"__builtins__": {}}, names)

    def answers(self, requests, items):
        """Returns retrieval and complete pass of requests by exact search: queries, candidates and their similarities, their
        order by the value model, values and task scores."""
        features = [request["features"] for request in requests]
        query = self.queries(features)
        similarity = without_history(query @ items["item"].T, [request["exclude"] for request in requests])
        candidates = top_k(similarity, CANDIDATES)
        scores = FUNCTIONS["sigmoid"](self.logits(features, query, items, candidates).astype(np.float64))
        similarity = np.take_along_axis(similarity, candidates, 1)
        value = self.value(scores, similarity.astype(np.float64))
        return zip(query, candidates, similarity, np.argsort(-value, 1, kind="stable"), value, scores)


def golden_answer(package, request, answer):
    query, candidates, similarity, ranked, value, scores = answer
    return {
        "user": request["user"],
        "features": request["features"],
        "exclude": request["exclude"],
        "query": [round(float(x), 7) for x in query],
        "retrieval": [{"id": int(c), "similarity": round(float(s), 7)} for c, s in zip(candidates[:50], similarity[:50])],
        "full": [
            {
                "id": int(candidates[n]),
                "score": round(float(value[n]), 7),
                "tasks": {task: round(float(scores[n, t]), 7) for t, task in enumerate(package.tasks)},
            }
            for n in ranked[:20]
        ],
    }


def warm_up(golden):
    """Returns a line of warmup.jsonl: a request that a server must answer alike before it may serve the model."""
    full = golden["full"]
    request = {name: golden[name] for name in ("features", "exclude")} | {"k": len(full), "candidates": CANDIDATES, "exact": True}
    return {"request": request, "ids": [item["id"] for item in full], "scores": [item["score"] for item in full], "tolerance": 0.005}


def evaluate(folder, data=None, golden=False):
    """Computes metrics on heldout.jsonl; writes them, and the golden answers if requested."""
    package = Package(folder)
    requests = [json.loads(line) for line in open(package.folder / "heldout.jsonl")]
    hidden = [set(request["held"]) for request in requests]
    items = package.items()
    retrieved, ranked, golden_answers = [], [], []
    for at in range(0, len(requests), 32):
        for request, answer in zip(requests[at : at + 32], package.answers(requests[at : at + 32], items)):
            retrieved.append(answer[1][: DEPTHS[-1]])
            ranked.append(answer[1][answer[3]][: DEPTHS[-1]])
            if golden and len(golden_answers) < GOLDEN_USERS:
                golden_answers.append(golden_answer(package, request, answer))

    tops = {}
    if data is not None:
        assert [data.users.source[user] for user in data.test_users] == [request["user"] for request in requests], "another split"
        tops["popularity"] = debian_data.by_popularity(data, data.test_users, DEPTHS[-1])
        tops["item-kNN (cosine)"] = debian_data.by_neighbours(data, data.test_users, DEPTHS[-1])
    tops["retrieval"], tops["full pass"] = np.array(retrieved), np.array(ranked)
    metrics = {name: {str(k): round(recall(top, hidden, k), 4) for k in DEPTHS} for name, top in tops.items()}
    for name, values in metrics.items():
        print(f"{name:20}", "  ".join(f"recall@{k} {v:.4f}" for k, v in values.items()))
    gain = metrics["full pass"]["20"] / metrics["retrieval"]["20"] - 1
    print(f"full pass over retrieval: {100 * gain:+.1f} % recall@20 on {len(requests)} users")
    if data is not None:
        report = {"test_users": len(requests), "dropped_repeats": data.repeats_dropped, "recall": metrics}
        report["weights"] = package.spec["value"].get("constants", {})
        (package.folder / "metrics.json").write_text(json.dumps(report, indent=1) + "\n")
    if golden:
        (package.folder / "golden.json").write_text(json.dumps(golden_answers, separators=(",", ":")) + "\n")
        lines = [json.dumps(warm_up(answer), separators=(",", ":")) + "\n" for answer in golden_answers[:WARM_UP_USERS]]
        (package.folder / "warmup.jsonl").write_text("".join(lines))
    if gain <= 0:
        raise SystemExit("the full pass does not beat retrieval: the package is not fit to publish")
    return metrics


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", action="store_true")
    options = parser.parse_args()
    evaluate(options.package, options.data and debian_data.load(options.data, options.seed), options.golden)


if __name__ == "__main__":
    main()
