#!/usr/bin/env python3
"""Measures the search by lists in Faiss, for the table of scripts/gpu-check.sh: IVF over int8 rows and over f32 rows, with the lists, probes
and results of `benches/gpu_floors.rs`; on a GPU also with cuVS, if Faiss was built with it.

    scripts/gpu_faiss.py ITEMS[,ITEMS…] [--device cuda|cpu]

The CPU mode only tests the script. Search alone: no filter, no rescoring, no reranker. Prints lines of the table.
"""

import argparse
import time

import faiss
import numpy

DIMENSION, RESULTS_MAX = 128, 2048


def median(runs, work):
    """Returns the microseconds of a call; Faiss waits for the GPU itself."""
    times = []
    for _ in range(runs + 3):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e6 * sorted(times[3:])[runs // 2]


def indexes(device, lists):
    """Yields empty indexes with their names."""
    metric = faiss.METRIC_INNER_PRODUCT
    if device == "cpu":
        for kind in ("SQ8", "Flat"):
            yield f"IVF,{kind}", faiss.index_factory(DIMENSION, f"IVF{lists},{kind}", metric)
        return
    resources = faiss.StandardGpuResources()
    yield "GpuIndexIVFScalarQuantizer", faiss.GpuIndexIVFScalarQuantizer(
        resources, DIMENSION, lists, faiss.ScalarQuantizer.QT_8bit, metric, True, faiss.GpuIndexIVFScalarQuantizerConfig())
    for is_cuvs in (False, True):
        config = faiss.GpuIndexIVFFlatConfig()
        if is_cuvs and "CUVS" not in faiss.get_compile_options():
            continue
        config.use_cuvs = is_cuvs
        yield "GpuIndexIVFFlat" + (" by cuVS" if is_cuvs else ""), faiss.GpuIndexIVFFlat(resources, DIMENSION, lists, metric, config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("items")
    parser.add_argument("--device", default="cuda" if getattr(faiss, "get_num_gpus", lambda: 0)() else "cpu")
    arguments = parser.parse_args()
    for count in map(int, arguments.items.split(",")):
        is_tiny = count < 1_000_000
        lists = max(16, int(count**0.5) // 16 * 16 * 4 // 3)
        probes, k0, runs = (2, 16, 1) if is_tiny else (24, 1024, 20)
        random = numpy.random.default_rng(1)
        items = random.standard_normal((count, DIMENSION), dtype=numpy.float32)
        for name, index in indexes(arguments.device, lists):
            index.train(items[: 64 * lists])
            index.add(items)
            index.nprobe = probes
            for batch in (1, 16, 64, 512):
                queries = random.standard_normal((batch, DIMENSION), dtype=numpy.float32)
                micros = median(runs, lambda: index.search(queries, min(k0, RESULTS_MAX)))
                what = f"Faiss {faiss.__version__}, {name}, {count} items, {lists} lists, {probes} probes, K0 = {k0}, batch {batch}"
                print(f"| {what} | | | {micros:.1f} | {1e6 * batch / micros:.0f} queries/s |", flush=True)


main()
