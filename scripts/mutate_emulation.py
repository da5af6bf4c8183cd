#!/usr/bin/env python3
"""Mutates the checks of the emulated GPU, and the code that they guard, one place at a time, and reports the mutants that the
tests miss.

    scripts/mutate_emulation.py [--only WORD]

Each mutant is built and run through the tests that should detect it, in about two minutes of a core. The sources are restored at
the end.
"""

import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EMULATED, LANE, CUDA = "crates/cuda/src/emulated.rs", "crates/cuda/src/lane.rs", "crates/serving/src/pass/gpu/cuda.rs"
LIMITS, MEMORY, STREAMS = (f"crates/cuda/src/emulated/{name}.rs" for name in ["limits", "memory", "streams"])
KERNELS, BESIDE = "crates/cuda/src/kernels/emulated.cpp", "crates/serving/src/pass/gpu/delta.rs"
# Mutants: the file, the original text, its replacement, and the tests that detect it.
MUTANTS = [
    ("freed while queued", MEMORY, "if let Some(work) = self.queued_over(run) {", "if let Some(work) = self.queued_over(run).filter(|_| false) {", "faults::memory_is"),
    ("unpinned while unfetched", MEMORY, "        if is_expected {", "        if is_expected && false {", "faults::memory_is_not_unpinned"),
    ("unregistered while queued", EMULATED, "if let Some(work) = self.queued_over((bytes.as_ptr() as u64, bytes.len())) {", "if let Some(work) = None::<&str> {", "faults::memory_of_the_host"),
    ("two results in one place", STREAMS, "        if is_taken {", "        if is_taken && false {", "faults::a_result"),
    ("use after free", MEMORY, "if overlaps(&locked(&GRAVES).runs, (address, bytes)) {", "if false {", "faults::freed_memory_is_not_used"),
    ("argument after free", EMULATED, "overlaps(&locked(&GRAVES).runs, (word, 1))", "word == 1 << 63", "faults::freed_memory_is_not_used"),
    ("no fill pattern", KERNELS, "std::memset(memory, 0xDD, bytes);", "(void)memory;", "faults::freed_memory_is_overwritten"),
    ("no quarantine", MEMORY, "graves.bytes > WITHHELD_BYTES_MAX", "graves.bytes > 0", "faults::freed_memory_is_overwritten"),
    ("reused as it was", STREAMS, "std::ptr::write_bytes(address as *mut u8, DEAD, bytes)", "drop((address, DEAD))", "faults::reused_memory_is_overwritten"),
    ("not settled", STREAMS, "if let Some(work) = too_early {", "if let Some(work) = too_early.filter(|_| false) {", "faults::streams_use_memory"),
    ("closed before its end", STREAMS, "if left > 0 && self.here().is_ok() {", "if left > 99 && self.here().is_ok() {", "faults::a_stream_is_not_closed"),
    ("streams in the order of the waits", STREAMS, "let is_other = !self.is_late && self.random(2) == 0;", "let is_other = false;", "faults::streams_run"),
    ("nothing before a wait", STREAMS, "if !self.is_late && self.random(4) == 0 {", "if false {", "faults::streams_run"),
    ("shared memory", LIMITS, "if shared_bytes > shared_max {", "if shared_bytes > 2 * shared_max {", "faults::launches"),
    ("threads", LIMITS, "threads > THREADS_MAX ||", "false ||", "faults::launches"),
    ("grid", LIMITS, "blocks == 0 || blocks > most", "blocks == 0", "faults::launches"),
    ("arguments", LIMITS, "if arguments.len() > ARGUMENTS_MAX {", "if false {", "faults::launches"),
    ("a stream begins over results", LANE, "        if unfetched > 0 {", "        if unfetched > 99 {", "lanes::a_stream_does_not_begin"),
    ("late groups take turns", CUDA, "by_turns[sent % by_turns.len()]", "by_turns[0]", "batches::whole_pass_skips"),
    ("no wait at the end", CUDA, "let _ = device.finish();", "let _ = device;", "batches::whole_pass_waits"),
    ("results of a failed stretch", LANE, "if let Some(failure) = &state.failure {", "if let Some(failure) = state.failure.as_ref().filter(|_| false) {", "faults::a_device"),
    ("keys of the last slot", BESIDE, "Spare::new((cut.slots() + BLOCK) as u32..", "Spare::new(cut.slots() as u32..", "updates::whole_pass_keeps"),
]


def notices(test):
    """Returns whether a test fails, or cannot be built."""
    command = ["cargo", "test", "--locked", "--workspace", "--features", "full", "--test", "gpu", "--", test]
    # One of the mutants shows in few batches only.
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | {"STERLING_BATCHES": "600"}, capture_output=True, text=True)
    if "could not compile" in ran.stderr:
        sys.exit(ran.stderr)
    if "running 0 tests" in ran.stdout:
        sys.exit(f"no test is named {test}")
    return ran.returncode != 0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    survivors = []
    for name, file, before, after, test in MUTANTS:
        if parser.parse_args().only not in name:
            continue
        path, text = ROOT / file, (ROOT / file).read_text()
        if text.count(before) != 1:
            sys.exit(f"{name}: {file} has {text.count(before)} times `{before}`")
        try:
            path.write_text(text.replace(before, after))
            is_noticed = notices(test)
        finally:
            path.write_text(text)
        print(f"{'caught' if is_noticed else 'SURVIVES':10} {name}", flush=True)
        survivors += [] if is_noticed else [name]
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
