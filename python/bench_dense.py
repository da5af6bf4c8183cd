"""ONNX Runtime on the dense part of the Debian model, one thread: beside `cargo bench --bench dense`.

    pip install onnxruntime numpy
    python python/bench_dense.py
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime

FOLDER = Path(__file__).resolve().parent.parent / "models" / "debian"
COLUMNS = ["log_popularity", "log_build", "log_depends", "log_recommends", "log_suggests"]
FEATURES = {"installed": 64, "installed_text": 32, "section": 16, "maintainer": 16}
ROUNDS = 9
ROUND_SECONDS = 0.06


def session(file: str) -> onnxruntime.InferenceSession:
    """A graph on one thread that does not spin."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(FOLDER / file), options, providers=["CPUExecutionProvider"])


def microseconds(graph: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]) -> float:
    """The median over the rounds of the mean time of a run, its inputs and output bound beforehand."""
    binding = graph.io_binding()
    for name, values in inputs.items():
        binding.bind_cpu_input(name, values)
    binding.bind_output(graph.get_outputs()[0].name)
    rounds = []
    for _ in range(ROUNDS):
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_SECONDS:
            graph.run_with_iobinding(binding)
            calls += 1
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(rounds)


def main() -> None:
    random = np.random.default_rng(7)
    numbers = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)  # noqa: E731
    print(f"onnxruntime {onnxruntime.__version__}, one thread")
    reranker, tower = session("overarch.onnx"), session("user.onnx")
    for count in [100, 1_000, 10_000]:
        inputs = {"query": numbers(1, 64), "item": numbers(1, count, 64)}
        inputs |= {name: numbers(1, count) for name in COLUMNS}
        print(f"reranker, K0 = {count}: {microseconds(reranker, inputs):.1f} µs")
    for users in [1, 8, 32]:
        inputs = {name: numbers(users, width) for name, width in FEATURES.items()}
        print(f"user tower, Q = {users}: {microseconds(tower, inputs):.1f} µs")


if __name__ == "__main__":
    main()
