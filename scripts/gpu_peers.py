#!/usr/bin/env python3
"""Measures the search of gpu_faiss.py in PyTorch, for the table of scripts/gpu-check.sh: composed of PyTorch's operations over lists, and as a plain
product with all items and topk (cuBLAS and torch.topk).

    scripts/gpu_peers.py ITEMS[,ITEMS…] [--device cuda]

Uses half precision on a GPU and single precision on a CPU, which only tests the script.
Prints rows of that Markdown table.
"""

import argparse
import time

import torch

DIMENSION, WIDTHS = 128, (256, 512, 256)


def median(device, runs, work):
    """Returns the microseconds of a call, from its start until the device has completed it."""
    times = []
    for _ in range(runs + 3):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times[3:])[runs // 2]


def line(what, micros, batch):
    print(f"| {what} | | | {micros:.1f} | {1e6 * batch / micros:.0f} queries/s |", flush=True)


def composed(items, centroids, queries, layers, each, probes, k0, k):
    """Probes, gathers the lists, scores their items, keeps the best K0, reranks them, keeps the best K."""
    lists = (queries @ centroids.T).topk(probes, dim=1).indices
    slots = (lists[:, :, None] * each + torch.arange(each, device=items.device)).flatten(1)
    scores = torch.bmm(items[slots], queries[:, :, None]).squeeze(2)
    best, places = scores.topk(k0, dim=1)
    rows = items[slots.gather(1, places)]
    rows = torch.cat([rows, queries[:, None, :].expand_as(rows)], dim=2)
    for layer in layers:
        rows = (rows @ layer).relu()
    return (best + rows[:, :, 0]).topk(k, dim=1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("items")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    kind = torch.float16 if device.type == "cuda" else torch.float32
    for count in map(int, arguments.items.split(",")):
        is_tiny = count < 1_000_000
        lists = max(16, int(count**0.5) // 16 * 16 * 4 // 3)
        each = max(16, -(-(count // lists) // 16) * 16)
        probes, k0, runs = (2, 16, 1) if is_tiny else (24, 1024, 20)
        torch.manual_seed(1)
        items = torch.randn(lists * each, DIMENSION, device=device, dtype=kind)
        centroids = torch.randn(lists, DIMENSION, device=device, dtype=kind)
        layers = [torch.zeros(WIDTHS[n], WIDTHS[n + 1], device=device, dtype=kind) for n in range(2)]
        for batch in (1, 16, 64, 512):
            queries = torch.randn(batch, DIMENSION, device=device, dtype=kind)
            try:
                work = lambda: composed(items, centroids, queries, layers, each, probes, k0, min(100, k0))
                line(f"PyTorch {torch.__version__}, composition, {count} items, batch {batch}", median(device, runs, work), batch)
            except torch.OutOfMemoryError:
                print(f"| PyTorch, composition, {count} items, batch {batch} | | | out of memory | |")
            try:
                work = lambda: (queries @ items.T).topk(k0, dim=1)
                line(f"cuBLAS and torch.topk, all of {count} items, batch {batch}", median(device, runs, work), batch)
            except torch.OutOfMemoryError:
                print(f"| cuBLAS and torch.topk, all of {count} items, batch {batch} | | | out of memory | |")


main()
