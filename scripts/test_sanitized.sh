#!/usr/bin/env bash
# The library's tests and those of the emulated GPU under AddressSanitizer, which tells of memory that is used after it was freed and of
# accesses outside an array, also in `unsafe` code. Building takes 20 minutes of two cores, in a folder of its own beside the usual one.
set -euo pipefail
cd "$(dirname "$0")/.."

target=x86_64-unknown-linux-gnu
if [ "$(uname -m)" != x86_64 ]; then
    echo "no x86-64: the emulated GPU and this sanitizer are left away" >&2
    exit 0
fi
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Copt-level=1"
# What threads keep to the end of the process is no leak; g++ compiles the kernels without this runtime, and tests them with its own elsewhere.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0}
cargo test --locked --target "$target" --workspace --features full --lib --test gpu -- --include-ignored --skip nothing_leaves_its_memory "$@"
