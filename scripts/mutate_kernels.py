#!/usr/bin/env python3
"""Mutates the kernels one place at a time and reports the mutants that the tests miss.

    cargo test --test gpu --no-run
    scripts/mutate_kernels.py target/debug/deps/gpu-… [--only FILE …] [--every N] [--part I/N] [--sample SEED] [--minutes M]

Each mutant is compiled for the host and tested by the tests that launch the kernels of its file, with up to three orders of
threads, and under sanitizers. Prints one line per mutant, survivors last. A survivor with a row in tests/gpu/known_mutants.txt
(its file, the text of its line and the change) is explained; others end the script with status 1. All mutants take hours: --every
takes all barriers and each N-th of the other mutants, --part one of N parts; --sample takes mutants in random order by a seed, and
--minutes ends the run after that time, so that the finished mutants are a sample of all mutants.
"""

import argparse
import collections
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "crates/cuda/src/kernels"
KNOWN = ROOT / "tests/gpu/known_mutants.txt"
# Kernel files, and the tests that launch their kernels, with tests that fail soonest first.
TESTS = {
    "topk.cu": ["top::"],
    "merge.cu": ["merge::"],
    "scan.cu": ["scan::"],
    "scan.cuh": ["scan::", "rows::"],
    "ahead.cu": ["termination::"],
    "pool.cu": ["bags::", "hot::", "lanes::"],
    "filter.cu": ["words::"],
    "rows.cu": ["rows::", "merge::"],
    "dense.cu": ["steps::"],
    "products.cu": ["steps::"],
    "value.cu": ["value_model::"],
    "sort.cu": ["learn::"],
    "learn.cu": ["learn::"],
}
CHANGES = [
    (r"__syncthreads\(\);", ";"), (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" && ", " || "),
    (r" \|\| ", " && "), (r" \+ ", " - "), (r" - 1\b", ""), (r"\+= ", "= "), (r"\|= ", "= "), (r" & ", " | "), (r"\bmin\(", "max("),
    (r"\bfmaxf\(", "fminf("), (r"atomicAdd\(", "atomicMax("), (r"EVERY_LANE\b(?=, )", "0x7fffffffu"), (r" / 2\b", " / 3"), (r" >> ", " << "),
    (r"\? (\w+) : (\w+)", r"? \2 : \1"),
]


def mutants(files):
    for file in files:
        text = (KERNELS / file).read_text()
        for pattern, change in CHANGES:
            for found in re.finditer(pattern, text):
                line = text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
                if found.expand(change) == found.group() or "//" in line or line.startswith("#") or "template" in line or ("for (u32 step" in line and pattern == r" < "):
                    continue
                yield file, found.start(), found.end(), found.expand(change), found.group().strip()


def caught(library, tests, modules, seeds, more):
    """Returns how the tests detect a mutant, or None if they do not."""
    for seed in seeds:
        environment = {"STERLING_EMULATION_LIBRARY": str(library), "STERLING_EMULATION_SEED": str(seed), "PATH": "/usr/bin:/bin", **more}
        try:
            skipped = ["--skip", "whole_pass", "--skip", "nothing_leaves", "--skip", "two_hundred"]
            ran = subprocess.run([tests, "--test-threads", "1", *skipped, *modules], env=environment, capture_output=True, timeout=60)
        except subprocess.TimeoutExpired:
            return "hangs"
        if ran.returncode != 0:
            return "fails" if ran.returncode > 0 else "crashes"
    return None


def try_one(tests, mutant):
    file, start, end, change, _ = mutant
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for source in KERNELS.iterdir():
            shutil.copy(source, folder)
        text = (KERNELS / file).read_text()
        (folder / file).write_text(text[:start] + change + text[end:])
        library = folder / "mutant.so"
        make = ["g++", "-std=c++17", "-O1", "-w", "-fPIC", "-shared", folder / "emulated.cpp", "-o", library]
        if subprocess.run(make, capture_output=True).returncode:
            return "no compile"
        verdict = caught(library, tests, TESTS[file], (1, 1000, 2000), {})
        if verdict is None:
            # Out-of-bounds accesses and undefined behaviour are detected by the run under sanitizers.
            subprocess.run([*make, "-fno-omit-frame-pointer", "-fsanitize=address,undefined"], check=True)
            asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
            options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0", "UBSAN_OPTIONS": "halt_on_error=1"}
            verdict = caught(library, tests, TESTS[file], (1,), {"LD_PRELOAD": asan, **options}) and "sanitizer"
        return verdict


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("tests")
    parser.add_argument("--only", nargs="+", default=[file for file in TESTS if (KERNELS / file).exists()])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    known = KNOWN.read_text() if KNOWN.exists() else ""
    unknown, counts = [], collections.Counter()
    all_of_them = list(mutants(arguments.only))
    barriers, others = ([m for m in all_of_them if (m[3] == ";") == of_barriers] for of_barriers in (True, False))
    chosen = (barriers + others[:: arguments.every])[part - 1 :: parts]
    if arguments.sample is not None:
        random.Random(arguments.sample).shuffle(chosen)
    end = time.monotonic() + 60 * arguments.minutes
    for mutant in chosen:
        if time.monotonic() > end:
            break
        file, start, _, change, what = mutant
        text = (KERNELS / file).read_text()
        line = text.count("\n", 0, start) + 1
        code = text.splitlines()[line - 1].strip()
        before = text[text.rfind("\n", 0, start) + 1 : start].strip()
        code, what, change = (part.replace("|", "\\|") for part in (code, what, change.strip()))
        row = f"| {file} | `{code}` | `{what}` → `{change}` at {len(before)} |"
        verdict = try_one(arguments.tests, mutant)
        if verdict is None:
            verdict = "explained" if row in known else "SURVIVES"
            unknown += [row] if verdict == "SURVIVES" else []
        counts[verdict] += 1
        print(f"{verdict:10} {file}:{line} {row}", flush=True)
    print(f"{sum(counts.values())} of {len(chosen)}: {dict(counts)}")
    print("\n".join(unknown))
    sys.exit(bool(unknown))


main()
