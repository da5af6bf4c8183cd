#!/usr/bin/env python3
"""Breaks the kernels in one place at a time and tells which breaks the tests do not notice.

    cargo test --test gpu --no-run
    scripts/mutate_kernels.py target/debug/deps/gpu-… [--most N] [--only FILE]

Each mutant is compiled for the host and run under up to three orders of threads. Barriers are all taken out in turn; of the other
changes (a comparison, a sum, a bound, a mask) every so many-th, so that there are N in all. Prints a line each, survivors last.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "src/device/cuda/kernels"
FILES = ["scan.cuh", "scan.cu", "topk.cu", "pool.cu", "filter.cu", "rows.cu", "dense.cu", "value.cu"]
CHANGES = [
    (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" && ", " || "), (r" \|\| ", " && "),
    (r" \+ ", " - "), (r" - 1\b", ""), (r"\+= ", "= "), (r"\|= ", "= "), (r" & ", " | "), (r"\bmin\(", "max("), (r"\bfmaxf\(", "fminf("),
    (r"atomicAdd\(", "atomicMax("), (r"EVERY_LANE\b(?=, )", "0x7fffffffu"), (r" / 2\b", " / 3"), (r" >> ", " << "), (r"\? (\w+) : (\w+)", r"? \2 : \1"),
]


def mutants(most):
    barriers, others = [], []
    for file in FILES:
        text = (KERNELS / file).read_text()
        for found in re.finditer(r"__syncthreads\(\);", text):
            barriers.append((file, found.start(), found.end(), ";", "no barrier"))
        for pattern, change in CHANGES:
            for found in re.finditer(pattern, text):
                line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
                if "//" in line or line.startswith("#") or "template" in line or "for (u32 step" in line and pattern == r" < ":
                    continue
                to = found.expand(change)
                others.append((file, found.start(), found.end(), to, f"`{found.group().strip()}` → `{to.strip()}`"))
    step = max(1, len(others) // max(1, most - len(barriers)))
    return barriers + others[::step]


def caught(library, tests):
    for seed in (1, 1000, 2000):
        environment = {"STERLING_EMULATION_LIBRARY": str(library), "STERLING_EMULATION_SEED": str(seed), "PATH": "/usr/bin:/bin"}
        try:
            skipped = ["--skip", "whole_pass", "--skip", "nothing_leaves", "--skip", "two_hundred"]
            ran = subprocess.run([tests, "--test-threads", "1", *skipped], env=environment, capture_output=True, timeout=40)
        except subprocess.TimeoutExpired:
            return "hangs"
        if ran.returncode != 0:
            return "fails" if ran.returncode > 0 else "crashes"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tests")
    parser.add_argument("--most", type=int, default=120)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    survivors, counts = [], {}
    for file, start, end, change, what in mutants(arguments.most):
        if arguments.only and file != arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for source in KERNELS.iterdir():
                shutil.copy(source, folder)
            text = (KERNELS / file).read_text()
            (folder / file).write_text(text[:start] + change + text[end:])
            library = folder / "mutant.so"
            made = subprocess.run(["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", folder / "emulated.cpp", "-o", library], capture_output=True)
            verdict = "no compile" if made.returncode else caught(library, arguments.tests)
        line = text.count("\n", 0, start) + 1
        counts[verdict or "survives"] = counts.get(verdict or "survives", 0) + 1
        print(f"{verdict or 'SURVIVES':10} {file}:{line} {what}", flush=True)
        if verdict is None:
            survivors.append(f"| {file}:{line} | {what} | `{text.splitlines()[line - 1].strip()[:90]}` |")
    print(counts)
    print("\n".join(survivors))
    sys.exit(bool(survivors))


main()
