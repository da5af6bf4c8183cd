#!/usr/bin/env python3
"""Measures models of common libraries: RecBole, TorchRec, transformers, and papers, exported by both of PyTorch's exporters.

    python -m venv target/real && . target/real/bin/activate
    pip install './python[export]' torch==2.14.1 transformers==5.24.0 fbgemm-gpu-cpu==1.9.0 tensordict torchmetrics pyre-extensions
    pip install pandas colorama texttable tqdm && pip install --no-deps torchrec==1.9.2 recbole==1.2.1 colorlog
    STERLING=target/release/sterling scripts/real_models.py [SASRec DLRM ...] [--exporters dynamo,torchscript] [--requests 200]
    scripts/real_models.py --towers target/release/deps/towers-0123456789abcdef

TorchRec 1.9 needs PyTorch 2.14, and its dependency `fbgemm-gpu` would overwrite the build for the CPU.

Each model is exported, published and served. The table shows for each graph whether it is compiled, or else the operator that is not supported, the
largest difference of queries and scores from the original module, and the time of one request on one thread against ONNX Runtime:
the user tower for one user, the reranker for one user and 1,000 candidates. Sterling and ONNX Runtime are measured alternately.
`--towers` times the graphs in the bench `towers` instead, without reading candidates, and compares the least times of both. `--cases` exports
the small modules of `python/real/cases.py` instead, and shows the difference between exported graph and module. Not part of any
test suite.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import onnxruntime  # noqa: E402
import sterling  # noqa: E402
import torch  # noqa: E402
from real import cases, table  # noqa: E402
from sterling import parity  # noqa: E402
from sterling.graphs import Examples  # noqa: E402

K0 = 1000
ROUNDS = 5
RECIPE = '[index]\nrescore = "f32"\n'


def forms(program, package):
    """Returns how each graph of a package runs, or the reason for the package's rejection."""
    said = subprocess.run([program, "inspect", package], capture_output=True, text=True)
    if said.returncode:
        return {"package": "rejected: " + (said.stderr.strip().splitlines() or ["?"])[-1].split(": ", 2)[-1][:160]}
    found = re.findall(r"^graph (\S+) (?:is (compiled)|is not compiled and runs in \w+: (.*)|(.*))", said.stdout, re.M)
    return {name: compiled or why or other for name, compiled, why, other in found}


def samples_of(exported):
    """Returns features of users: none, and histories of 1, 3 and 50 values."""
    features = exported.reference.features["user"]
    made = [{}]
    for count in (1, 3, 50):
        ids = np.random.default_rng(count).integers(0, 100, count).tolist()
        made.append({f.source: [0.5] * f.width if isinstance(f, sterling.Dense) else (ids if f.is_sequence else ids[:3]) for f in features})
    return made


def onnx_times(graph, count):
    """Returns a function that runs a graph in ONNX Runtime for one user and 1,000 candidates, and returns microseconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    examples = Examples(graph.inputs, torch.Generator().manual_seed(1))
    sizes = {"Q": 1, "N": 1, "K0": K0}
    given = {port.name: torch.ones_like(x).numpy() if port.is_mask else port.example(sizes, torch.Generator().manual_seed(2)).numpy()
             for port, x in zip(graph.inputs, examples.at(sizes))}  # fmt: skip

    def run():
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            session.run(None, given)
            taken.append((time.perf_counter() - start) * 1e6)
        return taken

    return run


def measured(exported, program, requests):
    """Publishes and serves a package; returns the largest difference from PyTorch, and per graph the times of Sterling and ONNX Runtime."""
    reference, samples = exported.reference, samples_of(exported)
    name = exported.path.name
    items = [json.loads(line) for line in (exported.path / "items.jsonl").read_text().splitlines()]
    rows = [{"id": item["id"]} | ({"embedding": item["embedding"]} if "embedding" in item else {}) | item["attributes"] for item in items]
    with tempfile.TemporaryDirectory() as folder:
        recipe = pathlib.Path(folder) / "recipe.toml"
        recipe.write_text(RECIPE)
        sterling.publish(exported.path, pathlib.Path(folder) / "store", index=recipe, program=program)
        with sterling.serve(pathlib.Path(folder) / "store", program=program, settings={"STERLING_ENGINE__WORKERS": "1"}) as server:
            call = f"/v1/models/{name}"
            worst = max(parity._of_query(reference, server, call, sample) for sample in samples)
            worst = max([worst, *(parity._of_ranking(reference, server, call, sample, rows) for sample in samples)])
            steps = {"user.onnx": "tower", "overarch.onnx": "overarch"}
            graphs = [graph for graph in (reference.user, reference.overarch) if graph]
            others = {graph.file: onnx_times(graph, requests // ROUNDS) for graph in graphs}
            ours, theirs = {graph.file: [] for graph in graphs}, {graph.file: [] for graph in graphs}
            body = {"features": samples[-1], "k": 10, "candidates": K0, "exact": True, "explain": True, "timeout_ms": 60_000}
            for _ in range(ROUNDS):
                for _ in range(requests // ROUNDS):
                    taken = {step["name"]: step["micros"] for step in server.post(f"{call}:retrieve", body)["explain"]["steps"]}
                    for file in ours:
                        ours[file].append(taken[steps[file]])
                for file, run in others.items():
                    theirs[file] += run()
            return worst, {file: (statistics.median(ours[file]), statistics.median(theirs[file])) for file in ours}


def in_bench(exported, bench, requests):
    """Runs the graphs of a package in the bench `towers`; returns per graph the least time of Sterling and of ONNX Runtime."""
    dimension = re.search(r"^dimension = (\d+)", (exported.path / "model.toml").read_text(), re.M)[1]
    process = subprocess.Popen([bench], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    times = {}
    for graph in (graph for graph in (exported.reference.user, exported.reference.overarch) if graph):
        is_reranker = graph.file == "overarch.onnx"

        def size(axis, is_reranker=is_reranker):
            return str(axis) if isinstance(axis, int) else "1" if is_reranker and axis == "Q" else "R"

        shapes = [f"{port.name}={'.'.join(map(size, port.shape))}" for port in graph.inputs]
        shapes.append("logits=1.R.1" if is_reranker else f"query=R.{dimension}")
        run, ours, theirs = onnx_times(graph, requests // ROUNDS), [], []
        for _ in range(ROUNDS):
            process.stdin.write(" ".join([str(exported.path / graph.file), str(K0 if is_reranker else 1), *shapes]) + "\n")
            process.stdin.flush()
            ours.append(float(process.stdout.readline().split()[1]))
            theirs += run()
        times[graph.file] = (min(ours), min(theirs))
    process.stdin.close()
    process.wait()
    return times


def row(name, source, exporter, build, folder, program, requests, bench):
    torch.manual_seed(7)
    try:
        exported = sterling.export(folder / re.sub(r"\W", "-", name).lower(), program=False, exporter=exporter, **build())
    except sterling.ExportError as e:
        return [name, source, exporter, "export rejected", " ".join(str(e).split())[:200], "", ""]
    found = {} if bench else forms(program, exported.path)
    if "package" in found:
        return [name, source, exporter, "refused", found["package"], "", ""]
    stopped = [f"{file}: {why}" for file, why in found.items() if why != "compiled"]
    try:
        if bench:
            worst, times = exported.largest, in_bench(exported, bench, requests)
        else:
            worst, times = measured(exported, program, requests) if requests else (exported.largest, {})
    except (sterling.ProgramError, sterling.ExportError, sterling.RequestError) as e:
        return [name, source, exporter, "refused", " ".join(str(e).split())[-200:], "", ""]
    ratio = ", ".join(f"{file.removesuffix('.onnx')} {ours:.0f} / {theirs:.0f} µs = {theirs / ours:.2f} x" for file, (ours, theirs) in times.items() if theirs > 5)
    return [name, source, exporter, "fallback" if stopped else "compiled", "; ".join(stopped), f"{worst:.1e}", ratio]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--exporters", default="dynamo,torchscript")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--towers", metavar="BENCH")
    options = parser.parse_args()
    program = None if options.towers else sterling.find_program(os.environ.get("STERLING"))
    torch.set_num_threads(1)
    given = [(case.name, "case", case.build) for case in cases.CASES] if options.cases else [(m.name, m.source, m.build) for m in table.MODELS]
    print("| model | source | exporter | runs | operator | largest difference | Sterling / ONNX Runtime |\n|---|---|---|---|---|---|---|", flush=True)
    counts = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, source, build in given:
            if options.names and name not in options.names:
                continue
            for exporter in options.exporters.split(","):
                try:
                    made = row(name, source, exporter, build, pathlib.Path(folder), program, 0 if options.cases else options.requests, options.towers)
                except ImportError as e:
                    made = [name, source, exporter, "not installed", str(e), "", ""]
                counts[made[3]] = counts.get(made[3], 0) + 1
                print("| " + " | ".join(cell.replace("|", "/") for cell in made) + " |", flush=True)
    print("\n" + ", ".join(f"{count} {what}" for what, count in sorted(counts.items())))


if __name__ == "__main__":
    main()
