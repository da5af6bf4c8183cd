"""Compares lookups of managed ids with TorchRec's way, a binary search over sorted ids, interleaved on one thread: prints the table of
docs/benchmarks/embedding-tables.md.

    cargo bench -p sterling-embedding --bench managed_ids --no-run
    pip install torch numpy
    python python/bench_managed.py [BENCH]

BENCH is the built bench, by default the newest target/release/deps/managed_ids-*. 10 million ids of 64 bits, batches of 10,000 ids. TorchRec's `MCHManagedCollisionModule.remap` does more than the search that is timed here. Rounds alternate, ROUNDS times; the
table has medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
ROWS, BATCH, BATCHES = 10_000_000, 10_000, 64
ROUNDS = 7
ROUND_SECONDS = 0.2
CASES = ["map", "map, no id held", "pooled by rows", "pooled by ids"]


class Peer:
    """Sorted ids and their rows, as TorchRec holds them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator).sort().values
        self.rows = torch.randperm(ROWS, generator=generator)
        self.batches = [self.ids[torch.randint(0, ROWS, (BATCH,), generator=generator)] for _ in range(BATCHES)]

    def nanoseconds(self) -> float:
        """Returns the nanoseconds per id of a round."""
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < ROUND_SECONDS:
            ids = self.batches[calls % BATCHES]
            at = torch.searchsorted(self.ids, ids)
            torch.where(self.ids[at] == ids, self.rows[at], ROWS - 1)
            calls += 1
        return (time.perf_counter() - start) / calls / BATCH * 1e9


def newest() -> Path:
    built = [path for path in (ROOT / "target/release/deps").glob("managed_ids-*") if path.suffix == ""]
    if not built:
        sys.exit("no bench, expected `cargo bench -p sterling-embedding --bench managed_ids --no-run` before")
    return max(built, key=lambda path: path.stat().st_mtime)


def main() -> None:
    torch.set_num_threads(1)
    peer = Peer()
    bench = subprocess.Popen([sys.argv[1] if len(sys.argv) > 1 else newest(), "--turns"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert bench.stdin and bench.stdout
    bench.stdout.readline()
    times: dict[str, list[float]] = {name: [] for name in [*CASES, "torch.searchsorted"]}
    for _ in range(ROUNDS):
        for case in CASES:
            bench.stdin.write(case + "\n")
            bench.stdin.flush()
            times[case].append(float(bench.stdout.readline()))
        times["torch.searchsorted"].append(peer.nanoseconds())
    bench.stdin.close()
    bench.wait()
    print("| lookup | ns per id |\n|---|---|")
    for name, rounds in times.items():
        print(f"| {name} | {statistics.median(rounds):.1f} |")


if __name__ == "__main__":
    main()
