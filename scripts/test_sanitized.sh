#!/usr/bin/env bash
# Runs the tests of the library and of the emulated GPU under AddressSanitizer, which reports use after free and out-of-bounds
# accesses, also in `unsafe` code. Building takes 20 minutes on two cores, in its own target folder.
set -euo pipefail
cd "$(dirname "$0")/.."

target=x86_64-unknown-linux-gnu
if [ "$(uname -m)" != x86_64 ]; then
    echo "no x86-64: the emulated GPU and this sanitizer are left away" >&2
    exit 0
fi
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Copt-level=1"
# Memory that threads keep until the process ends is no leak; g++ compiles the kernels without this runtime, and other tests run
# them with its own. Tables that are too large for memory must be an error, which a test requests.
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:allocator_may_return_null=1}
cargo test --locked --target "$target" --workspace --features full --lib --test gpu -- --include-ignored --skip kernels_stay_within_their_memory "$@"
