"""Pooled lookups of one thread compared with the CPU operators of PyTorch and FBGEMM, on the same stream of ids, alternating.

    python python/bench_pool.py [--rounds 3] [--rows 10000000] [--width 64] [--pooling 20,100]

Needs the packages of python/make_sparse_golden.py, and cargo. Each round runs benches/pool.rs (whose head describes the
measurement), then each operator here in its own process, so that one table at a time is in memory. Every operator gets one
thread, inference mode, calls of 512 bags, ids of its preferred width, one untimed pass and five timed ones, in CPU time of the
thread. `torch_*` run as they are installed; `torch_huge_*` and FBGEMM's get their table in huge pages (THP_MEM_ALLOC_ENABLE=1),
and FBGEMM its faster code path (FBGEMM_FORCE_AUTOVEC=1). JSON lines go to stdout, followed by a table of medians over the rounds,
with the ratios.
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
BAGS = 512
PASSES = 5
PEERS = (
    "torch_f32",
    "torch_huge_f32",
    "torch_int8",
    "torch_huge_int8",
    "fbgemm_f32",
    "fbgemm_int8",
    "fbgemm_train_f32",
)
TUNED = {"THP_MEM_ALLOC_ENABLE": "1", "FBGEMM_FORCE_AUTOVEC": "1"}


def peer_call(name, rows, width):
    """Returns the operator over a table of random rows, as call(ids, offsets) -> [bags, width], and its type of ids."""
    import torch

    if name in ("torch_f32", "torch_huge_f32"):
        module = torch.nn.EmbeddingBag(
            rows, width, mode="sum", _weight=torch.empty(rows, width).uniform_(-1, 1), include_last_offset=True
        )
        return module, torch.int64
    if name in ("torch_int8", "torch_huge_int8"):
        # Rowwise int8 of torch.ao: D codes, f32 scale, f32 bias.
        packed = torch.empty(rows, width + 8, dtype=torch.uint8)
        for at in range(0, rows, 1 << 20):
            part = torch.empty(min(1 << 20, rows - at), width).uniform_(-1, 1)
            packed[at : at + len(part)] = torch.ops.quantized.embedding_bag_byte_prepack(part)
        operator = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
        return lambda ids, offsets: operator(packed, ids, offsets, include_last_offset=True), torch.int32

    import fbgemm_gpu  # noqa: F401  (registers the operators)
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

    if name == "fbgemm_train_f32":
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)], pooling_mode=PoolingMode.SUM
        )
        module.init_embedding_weights_uniform(-1, 1)
        return module, torch.int64

    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen

    stored = {"fbgemm_f32": SparseType.FP32, "fbgemm_int8": SparseType.INT8}[name]
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("items", rows, width, stored, EmbeddingLocation.HOST)],
        device="cpu",
        pooling_mode=PoolingMode.SUM,
        output_dtype=SparseType.FP32,
        row_alignment=1,
    )
    module.initialize_weights()
    table = module.split_embedding_weights(split_scale_shifts=False)[0][0]
    for at in range(0, rows, 1 << 20):
        part = torch.empty(min(1 << 20, rows - at), width).uniform_(-1, 1)
        if stored == SparseType.INT8:
            fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(part, 8)
            part = torch.cat([fused[:, -4:], fused[:, :-4]], dim=1)
        else:
            part = part.view(torch.uint8)
        table[at : at + len(part)] = part
    return module, torch.int32


def run_peer(name, rows, width, pooling, folder):
    """Prints one JSON line per pooling factor, in the form of benches/pool.rs."""
    import numpy
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    call, kind = peer_call(name, rows, width)
    stream = torch.from_numpy(numpy.fromfile(f"{folder}/zipf.i64", dtype="<i8")).to(kind)
    for length in pooling:
        whole = len(stream) // (BAGS * length)
        batches = [part.clone() for part in stream[: whole * BAGS * length].split(BAGS * length)]
        offsets = torch.arange(0, BAGS * length + 1, length, dtype=kind)
        passes = []
        with torch.inference_mode():
            for _ in range(PASSES + 1):
                start = time.thread_time_ns()
                for ids in batches:
                    call(ids, offsets)
                passes.append((time.thread_time_ns() - start) / (whole * BAGS * length))
        passes = sorted(passes[1:])
        line = {
            "what": name,
            "format": name.rsplit("_", 1)[1],
            "rows": rows,
            "width": width,
            "ids": "zipf",
            "pooling": length,
            "best_ns": passes[0],
            "median_ns": passes[len(passes) // 2],
        }
        print(json.dumps(line), flush=True)


def lines_of(command, **more):
    """Yields the JSON lines of a command, and passes them on as they arrive."""
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
    """Prints medians over the rounds, and each ratio to `lookup` with the same format and pooling."""
    runs = {}
    for line in lines:
        key = (line["format"], line.get("pooling", 0), line["what"], line["ids"])
        runs.setdefault(key, []).append(line["median_ns"])
    medians = {key: statistics.median(times) for key, times in runs.items()}
    print(f"{'format':7} {'pooling':>7} {'what':18} {'ids':8} {'ns an id':>9} {'least':>7} {'most':>7} {'of lookup':>9}")
    for key, middle in sorted(medians.items()):
        kind, pooling, what, ids = key
        lookup = medians.get((kind, pooling, "lookup", "zipf"))
        quotient = f"{middle / lookup:9.2f}" if lookup else ""
        times = runs[key]
        print(f"{kind:7} {pooling or '':>7} {what:18} {ids:8} {middle:9.1f} {min(times):7.1f} {max(times):7.1f} {quotient}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--pooling", default="20,100")
    parser.add_argument("--peer", choices=PEERS, help="run one operator alone, on the ids in --ids")
    parser.add_argument("--peers", default=",".join(PEERS), help="the operators to run")
    parser.add_argument("--program", help="benches/pool.rs as it was built; none means to run it through cargo")
    parser.add_argument("--ids", help="folder of the ids; none means one that is removed afterwards")
    options = parser.parse_args()
    if options.peer:
        pooling = [int(n) for n in options.pooling.split(",")]
        return run_peer(options.peer, options.rows, options.width, pooling, options.ids)
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(options.ids or scratch).resolve())
        shape = ["--rows", str(options.rows), "--width", str(options.width), "--pooling", options.pooling, "--ids", folder]
        lines = []
        for _ in range(options.rounds):
            ours = [options.program] if options.program else ["cargo", "bench", "--quiet", "--bench", "pool", "--"]
            lines += lines_of([*ours, *shape])
            for peer in options.peers.split(","):
                tuned = {} if peer in ("torch_f32", "torch_int8") else TUNED
                environment = {**os.environ, **tuned}
                lines += lines_of([sys.executable, __file__, "--peer", peer, *shape], env=environment)
    summary(lines)


if __name__ == "__main__":
    main()
