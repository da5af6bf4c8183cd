#!/usr/bin/env python3
"""Compiles every kernel for each architecture with NVRTC, without a GPU, and compares the resource usage with a table.

    scripts/compile_kernels.py NVRTC [--write]

NVRTC is a folder with libnvrtc.so.13, as in the package nvidia-cuda-nvrtc 13.0.88. The script fails on a compile error, on a register
spill or a stack frame, since no kernel has either, and if the usage differs from crates/cuda/src/kernels/registers.txt; --write
updates that file.
"""

import argparse
import ctypes
import pathlib
import re
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
KERNELS = ROOT / "crates/cuda/src/kernels"
TABLE = ROOT / "crates/cuda/src/kernels/registers.txt"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
FILES = ["scan.cu", "topk.cu", "merge.cu", "ahead.cu", "pool.cu", "filter.cu", "rows.cu", "dense.cu", "products.cu", "value.cu", "sort.cu", "learn.cu"]
HEADERS = ["platform.cuh", "scan.cuh", "digits.cuh", "dense.cuh", "learn.cuh"]


def load(folder):
    found = sorted(pathlib.Path(folder).rglob("libnvrtc-builtins.so.13*")) + sorted(pathlib.Path(folder).rglob("libnvrtc.so.13"))
    if len(found) < 2:
        sys.exit(f"{folder}: no libnvrtc.so.13 with its builtins")
    # NVRTC loads its builtins by name only, so the builtins must be loaded before it.
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in found][-1]


def compile_one(nvrtc, name, architecture):
    text = lambda file: (KERNELS / file).read_bytes()
    names = (ctypes.c_char_p * len(HEADERS))(*[h.encode() for h in HEADERS])
    texts = (ctypes.c_char_p * len(HEADERS))(*[text(h) for h in HEADERS])
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "--ptxas-options=-v"]
    options = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
    program = ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text(name), name.encode(), len(HEADERS), texts, names) == 0
    result = nvrtc.nvrtcCompileProgram(program, len(options), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if result == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return result, log.value.decode(), size.value


def resources(log):
    """Returns registers, bytes of stack and of spills of each kernel from the compiler's log."""
    found = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'")[0]
        stack, stores, loads = map(int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        found[kernel] = (registers, stack, stores + loads)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("nvrtc")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    nvrtc = load(arguments.nvrtc)
    start, rows, wrong, total = time.time(), {}, [], 0
    for name in FILES:
        for architecture in ARCHITECTURES:
            result, log, size = compile_one(nvrtc, name, architecture)
            total += size
            if result != 0:
                wrong.append(f"{name} for {architecture}:\n{log}")
                continue
            for kernel, used in resources(log).items():
                rows.setdefault((name, kernel), {})[architecture] = used
                _, stack, spilled = used
                if stack or spilled:
                    wrong.append(f"{kernel} for {architecture} has a stack of {stack} bytes and spills {spilled}")
    lines = [f"| `{kernel}` | {name} | " + " | ".join("{} / {}".format(*rows[name, kernel].get(a, ("?", "?"))[:2]) for a in ARCHITECTURES) + " |"
             for name, kernel in rows]
    table = "\n".join(["| kernel | file | " + " | ".join(ARCHITECTURES) + " |", "|---|---|" + "---|" * len(ARCHITECTURES)] + lines)
    print(f"{len(rows)} kernels x {len(ARCHITECTURES)} architectures in {time.time() - start:.1f} s, {total} bytes of cubins")
    page = TABLE.read_text() if TABLE.exists() else ""
    if arguments.write:
        head = page.split("| kernel |")[0]
        TABLE.write_text(head + table + "\n")
    elif table not in page:
        wrong.append(f"crates/cuda/src/kernels/registers.txt holds another table; with --write it becomes:\n{table}")
    if wrong:
        sys.exit("\n".join(wrong))


main()
