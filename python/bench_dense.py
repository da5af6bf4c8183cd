"""Compares a reranker and the user tower of the Debian model with ONNX Runtime and, if it is installed, OpenVINO in bf16, on one
thread, alternating: prints the table of docs/benchmarks/pass.md.

    cargo bench --bench dense --no-run
    pip install onnxruntime numpy openvino
    python python/bench_dense.py [BENCH]

BENCH is the built bench, by default the newest target/release/deps/dense-*. A round runs each case with each side (rten, programs
in f32 with AVX-512 and AVX2, in bf16, ONNX Runtime), ROUNDS times; reports medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

try:
    import openvino
except ImportError:
    openvino = None

ROOT = Path(__file__).resolve().parent.parent
RERANKER, TOWER = ROOT / "tests/golden/reranker.onnx", ROOT / "models/debian/user.onnx"
COLUMNS = ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"]
# Graphs of `benches/graphs` as `benches/dense.rs` runs them: candidates, and inputs.
KINDS = {
    "mol": (10_000, {"query": (64,), "user_parts": (8, 32), "item": (None, 64), "parts": (None, 256)}),
    "target": (1_000, {"item": (None, 64), "history": (200, 64), "mask": (200,)}),
    "din": (1_000, {"query": (64,), "item": (None, 64), "history": (200, 64), "mask": (200,)}),
}
FEATURES = {"installed": 64, "installed_text": 32, "section": 16, "maintainer": 16}
ROUNDS = 11
ROUND_SECONDS = 0.04


def session(path: Path) -> onnxruntime.InferenceSession:
    """Returns a session of a graph on one thread without spinning."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Peer:
    """ONNX Runtime with preallocated inputs and output."""

    def __init__(self, graph: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]) -> None:
        self.graph, self.binding = graph, graph.io_binding()
        for name, values in inputs.items():
            self.binding.bind_cpu_input(name, values)
        self.binding.bind_output(graph.get_outputs()[0].name)

    def microseconds(self) -> float:
        """Returns the microseconds of a run, the mean of a round."""
        return mean_of_round(lambda: self.graph.run_with_iobinding(self.binding))


class OpenVino:
    """OpenVINO in bf16, with preallocated inputs."""

    def __init__(self, path: Path, inputs: dict[str, np.ndarray]) -> None:
        core = openvino.Core()
        model = core.read_model(path)
        model.reshape({name: list(values.shape) for name, values in inputs.items()})
        hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        self.request = core.compile_model(model, "CPU", hints).create_infer_request()
        for name, values in inputs.items():
            self.request.set_tensor(name, openvino.Tensor(values, shared_memory=True))

    def microseconds(self) -> float:
        """Returns the microseconds of a run, the mean of a round."""
        return mean_of_round(self.request.infer)


def mean_of_round(call: Callable[[], object]) -> float:
    """Returns the microseconds of a call, the mean of a round."""
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < ROUND_SECONDS:
        call()
        calls += 1
    return (time.perf_counter() - start) / calls * 1e6


class Bench:
    """The bench of this repository, which receives one case at a time."""

    def __init__(self, path: Path, kernel: str | None) -> None:
        env = os.environ | ({"STERLING_KERNEL": kernel} if kernel else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(path), "--turns"], stdin=pipe, stdout=pipe, text=True, env=env)
        self.header = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def microseconds(self, case: str) -> float:
        """Returns the microseconds of a call, the mean of a round."""
        assert self.process.stdin is not None
        self.process.stdin.write(case + "\n")
        self.process.stdin.flush()
        return float(self.line())


def peers() -> tuple[dict[str, Peer], dict[str, OpenVino]]:
    """Returns ONNX Runtime on each case, and OpenVINO on those of the reranker."""
    random = np.random.default_rng(7)
    numbers = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)  # noqa: E731
    reranker, tower = session(RERANKER), session(TOWER)
    all_of, others = {}, {}
    for count in [100, 1_000, 10_000]:
        inputs = {"query": numbers(1, 64), "item": numbers(1, count, 64)}
        inputs |= {name: numbers(1, count) for name in COLUMNS}
        all_of[f"reranker {count}"] = Peer(reranker, inputs)
        if openvino:
            others[f"reranker {count}"] = OpenVino(RERANKER, inputs)
    for users in [1, 8, 32]:
        all_of[f"tower {users}"] = Peer(tower, {name: numbers(users, width) for name, width in FEATURES.items()})
    for name, (count, shapes) in KINDS.items():
        inputs = {key: numbers(1, *(count if n is None else n for n in shape)) for key, shape in shapes.items()}
        if "mask" in inputs:
            inputs["mask"][:] = 1
        all_of[f"{name} {count}"] = Peer(session(ROOT / "benches" / "graphs" / f"{name}.onnx"), inputs)
    return all_of, others


def built() -> Path:
    """Returns the newest build of the bench."""
    found = [p for p in (ROOT / "target/release/deps").glob("dense-*") if os.access(p, os.X_OK) and not p.suffix]
    if not found:
        sys.exit("no bench is built: cargo bench --bench dense --no-run")
    return max(found, key=lambda p: p.stat().st_mtime)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else built()
    best, avx2, (runtime, others) = Bench(path, None), Bench(path, "avx2"), peers()
    ways = {
        "rten": lambda case: best.microseconds(f"{case} rten"),
        "f32": lambda case: best.microseconds(f"{case} f32"),
        "f32 in AVX2": lambda case: avx2.microseconds(f"{case} f32"),
        "bf16": lambda case: best.microseconds(f"{case} bf16"),
        "kept by item": lambda case: best.microseconds(f"{case} kept") if case.startswith("mol") else float("nan"),
        "OpenVINO bf16": lambda case: others[case].microseconds() if case in others else float("nan"),
    }
    print(f"onnxruntime {onnxruntime.__version__}; kernels and peaks in f32 and bf16: {best.header}; {avx2.header}\n")
    print("| | ONNX Runtime µs |" + "".join(f" {way} µs | x |" for way in ways))
    print("|---|---|" + "---|---|" * len(ways))
    for case, peer in runtime.items():
        rounds = [[peer.microseconds(), *(way(case) for way in ways.values())] for _ in range(ROUNDS)]
        base, *times = [statistics.median(column) for column in zip(*rounds)]
        print(f"| {case} | {base:.1f} |" + "".join(f" {own:.1f} | {base / own:.2f} |" for own in times))
    ways = ["rten", "f32", "bf16"]
    rounds = [[best.microseconds(f"tower cold {way}") for way in ways] for _ in range(ROUNDS)]
    rten, *own = [statistics.median(column) for column in zip(*rounds)]
    times = ", ".join(f"{way} {t:.1f} µs ({rten / t:.2f} x)" for way, t in zip(ways[1:], own))
    print(f"\ntower at Q = 1 after 8 MiB of other memory were read: rten {rten:.1f} µs, {times}")


if __name__ == "__main__":
    main()
