#!/usr/bin/env bash
# The suite on a machine with a card and no Rust: `scripts/gpu-check.sh TESTS [CARD]`.
# TESTS is the program that `cargo test --features cuda --test gpu --no-run` names, built elsewhere; it needs this checkout for its models.
# No one has run this on a card yet.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${1:?the test program}
card=${2:-cuda:0}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || { echo "no card, or no driver" >&2; exit 1; }
git log -1 --format='commit %h, %cs' 2>/dev/null || true
# NVRTC, where a Python package brought it.
nvrtc=$(python3 -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13", "lib"))' 2>/dev/null || true)
export LD_LIBRARY_PATH="${nvrtc:+$nvrtc:}/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
export STERLING_TEST_DEVICE=$card

echo "== kernels and launches on $card"
"$tests" --test-threads 1 --skip nothing_leaves_its_memory --skip whole_pass
echo "== whole passes on $card"
"$tests" --test-threads 1 whole_pass
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        echo "== $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --test-threads 1 --skip nothing_leaves_its_memory --skip whole_pass --skip two_hundred
    done
else
    echo "compute-sanitizer is not here: not run"
fi
