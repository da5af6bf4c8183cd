#!/usr/bin/env python3
"""Measures the training step of benches/gpu/training.rs in FBGEMM, for the table of scripts/gpu-check.sh: forward, backward and update of
four tables with a fused optimizer, ids and gradients in device memory.

    scripts/gpu_train_peers.py [--device cuda] [--tiny]

Prints lines of the table. On a CPU, which only tests the script, FBGEMM runs its CPU kernels.
"""

import argparse
import time

import numpy
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

EXPONENT, BATCHES = 1.05, 4


def draw(rows, count, is_zipf, random):
    if not is_zipf:
        return random.integers(0, rows, count)
    sums = numpy.cumsum(numpy.arange(1, rows + 1, dtype=numpy.float64) ** -EXPONENT)
    ranks = numpy.minimum(numpy.searchsorted(sums, random.random(count) * sums[-1]), rows - 1)
    return ranks.astype(numpy.uint64) * numpy.uint64(0x9E3779B1) % numpy.uint64(rows)


def step_micros(module, batches, offsets, gradients, device, runs):
    def once():
        start = time.perf_counter()
        for ids in batches:
            module(ids, offsets).backward(gradients)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e6 * (time.perf_counter() - start) / len(batches)

    times = [once() for _ in range(runs + 3)]
    return sorted(times[3:])[runs // 2]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_gpu = device.type == "cuda"
    tables, rows, width, batch, pooling, runs = (2, 200, 16, 8, 5, 1) if arguments.tiny else (4, 1_000_000, 64, 8192, 20, 20)
    kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "sgd": EmbOptimType.EXACT_SGD, "adam": EmbOptimType.ADAM}
    random = numpy.random.default_rng(1)
    offsets = torch.arange(0, tables * batch * pooling + 1, pooling, device=device)
    gradients = torch.randn(batch, tables * width, device=device) * 0.01
    for name, kind in kinds.items():
        if not on_gpu and name == "adam":
            continue  # FBGEMM has no Adam for tables on the CPU.
        for is_zipf in (True, False):
            place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
            module = SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, width, *place)] * tables,
                optimizer=kind,
                learning_rate=0.01,
                eps=1e-8,
                bounds_check_mode=BoundsCheckMode.NONE,
                device=device,
            )
            module.init_embedding_weights_uniform(-0.05, 0.05)
            batches = [
                torch.from_numpy(draw(rows, tables * batch * pooling, is_zipf, random).astype(numpy.int64)).to(device)
                for _ in range(BATCHES)
            ]
            micros = step_micros(module, batches, offsets, gradients, device, runs)
            ids = "Zipf 1.05" if is_zipf else "uniform"
            print(f"| FBGEMM: forward, backward, {name}, {tables} tables of {rows} x {width}, batch {batch}, {ids} | | | {micros:.1f} | |", flush=True)


main()
