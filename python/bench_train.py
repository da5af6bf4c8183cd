"""Compares a training step of embedding tables with FBGEMM's and PyTorch's on the CPU, on the same ids, interleaved.

    python python/bench_train.py [--rounds 3] [--ids zipf,uniform] [--rows 1000000] [--width 64] [--batch 512] [--pooling 20]

Needs the packages of python/make_train_golden.py, and cargo. Each round runs benches/train_tables.rs (its front page describes the
figures), then each other library in its own process: forward, backward and update of four tables, one thread, batches of the same
stream. FBGEMM runs as installed and with its faster code path (FBGEMM_FORCE_AUTOVEC=1); PyTorch's `EmbeddingBag(sparse=True)` runs with
its optimizers of sparse gradients. JSON lines go to stdout; a table of medians over the rounds, with the ratios, ends the run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("fbgemm_rowwise_adagrad", "fbgemm_tuned_rowwise_adagrad", "fbgemm_tuned_sgd", "torch_adagrad", "torch_sgd")
WARM_UP = 3


def fbgemm_step(kind, options):
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(options.rows, options.width, EmbeddingLocation.HOST, ComputeDevice.CPU)] * options.tables,
        optimizer={"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD}[kind],
        learning_rate=0.01,
        eps=1e-8,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    module.init_embedding_weights_uniform(-0.05, 0.05)
    offsets = torch.arange(0, options.tables * options.batch * options.pooling + 1, options.pooling)
    return lambda ids, gradients: module(ids, offsets).backward(gradients)


def torch_step(kind, options):
    import torch

    bags = [torch.nn.EmbeddingBag(options.rows, options.width, mode="sum", sparse=True) for _ in range(options.tables)]
    for bag in bags:
        torch.nn.init.uniform_(bag.weight, -0.05, 0.05)
    parameters = [bag.weight for bag in bags]
    optimizers = {
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=0.01, eps=1e-8),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.01),
    }
    optimizer = optimizers[kind]()
    offsets = torch.arange(0, options.batch * options.pooling, options.pooling)

    def step(ids, gradients):
        out = torch.cat([bag(part, offsets) for bag, part in zip(bags, ids.chunk(options.tables))], 1)
        optimizer.zero_grad(set_to_none=True)
        out.backward(gradients)
        optimizer.step()

    return step


def run_peer(name, ids, options):
    """Prints one JSON line in the form of benches/train_tables.rs."""
    import numpy
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    library, kind = name.replace("_tuned", "").split("_", 1)
    step = {"fbgemm": fbgemm_step, "torch": torch_step}[library](kind, options)
    per_step = options.tables * options.batch * options.pooling
    stream = torch.from_numpy(numpy.fromfile(f"{options.stream}/{ids}.i64", dtype="<i8"))
    batches = [part.clone() for part in stream.split(per_step)]
    gradients = torch.randn(options.batch, options.tables * options.width) * 0.01
    times, end, at = [], time.perf_counter() + options.seconds, 0
    while time.perf_counter() < end or at < 2 * WARM_UP:
        start = time.perf_counter_ns()
        step(batches[at % len(batches)], gradients)
        times.append((time.perf_counter_ns() - start) / per_step)
        at += 1
    times = sorted(times[WARM_UP:])
    line = {
        "what": name,
        "ids": ids,
        "threads": options.threads,
        "steps": len(times),
        "median_ns": times[len(times) // 2],
        "p10_ns": times[len(times) // 10],
    }
    print(json.dumps(line), flush=True)


def lines_of(command, **more):
    """Runs a command, echoes the JSON lines that it prints, and returns them."""
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, **more) as process:
        for line in process.stdout:
            if line.startswith("{"):
                print(line, end="", flush=True)
                found.append(json.loads(line))
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit code {process.returncode}")
    return found


def summary(lines):
    """Prints medians over the rounds, and the ratio of each to Sterling's step on the same ids."""
    runs = {}
    for line in lines:
        if "median_ns" in line:
            name = f"{line['what']} {line.get('rule', '')}".strip()
            runs.setdefault((line["ids"], name), []).append(line)
    print(f"{'ids':8} {'what':30} {'ns per id':>9} {'least':>7} {'most':>7} {'of ours':>8} {'of floor':>8}")
    for (ids, what), found in sorted(runs.items()):
        times = [line["median_ns"] for line in found]
        middle = statistics.median(times)
        ours = statistics.median([line["median_ns"] for line in runs[ids, "step rowwise_adagrad"]])
        shares = [line["share_of_floor"] for line in found if "share_of_floor" in line]
        share = f"{statistics.median(shares):8.2f}" if shares else ""
        print(f"{ids:8} {what:30} {middle:9.1f} {min(times):7.1f} {max(times):7.1f} {middle / ours:8.1f} {share}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--pooling", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--ids", default="zipf,uniform")
    parser.add_argument("--peer", choices=PEERS, help="run one peer alone, on the ids in --stream")
    parser.add_argument("--peers", default=",".join(PEERS), help="the peers to run")
    parser.add_argument("--program", help="benches/train_tables.rs as it was built; none means to run it through cargo")
    parser.add_argument("--stream", help="folder of the ids; none means one that is removed afterwards")
    options = parser.parse_args()
    if options.peer:
        return run_peer(options.peer, options.ids, options)
    names = ("tables", "rows", "width", "batch", "pooling", "threads", "seconds")
    shape = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(options.stream or scratch).resolve())
        lines = []
        for _ in range(options.rounds):
            for ids in options.ids.split(","):
                of_ids = [*shape, "--stream", folder, "--ids", ids]
                cargo = ["cargo", "bench", "--quiet", "--bench", "train_tables", "--"]
                lines += lines_of([*([options.program] if options.program else cargo), *of_ids])
                for peer in options.peers.split(","):
                    tuned = {"FBGEMM_FORCE_AUTOVEC": "1"} if "tuned" in peer else {}
                    environment = {**os.environ, **tuned}
                    lines += lines_of([sys.executable, __file__, "--peer", peer, *of_ids], env=environment)
    summary(lines)


if __name__ == "__main__":
    main()
