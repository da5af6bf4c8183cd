#!/usr/bin/env bash
# One command on a machine with a card and no Rust: `scripts/gpu-check.sh TESTS [CARD]`.
# TESTS is the program that `cargo test --release --features cuda --test gpu --no-run` names, built elsewhere; it needs this checkout for its models.
# First the suite, then compute-sanitizer where it is, then a table: kernels against their floors, whole passes, and PyTorch and Faiss where they are.
#
#   STERLING_FLOORS=1000000,10000000   how many items the table is of
#   CARD=emulated                      all of it on the emulation, with few items: shows that it goes through, its times mean nothing
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${1:?the test program}
card=${2:-cuda:0}
python=${PYTHON:-python3}

git log -1 --format='commit %h, %cs' 2>/dev/null || true
if [ "$card" = emulated ]; then
    export STERLING_FLOORS=${STERLING_FLOORS:-3000}
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || { echo "no card, or no driver" >&2; exit 1; }
    # NVRTC, where a Python package brought it.
    nvrtc=$("$python" -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13", "lib"))' 2>/dev/null || true)
    export LD_LIBRARY_PATH="${nvrtc:+$nvrtc:}/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    export STERLING_TEST_DEVICE=$card STERLING_FLOORS=${STERLING_FLOORS:-1000000,10000000}
fi

if [ "${SUITE:-yes}" = yes ]; then
    echo "== kernels and launches on $card"
    "$tests" --test-threads 1 --skip nothing_leaves_its_memory --skip whole_pass --skip floors
    echo "== whole passes on $card"
    "$tests" --test-threads 1 whole_pass
fi
if [ "$card" != emulated ] && command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck; do
        echo "== $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 1 "$tests" --test-threads 1 --skip nothing_leaves_its_memory --skip whole_pass --skip floors --skip two_hundred
    done
else
    echo "== compute-sanitizer is not here, or there is no card for it: not run"
fi

echo "== floors on $card, $(date -u +%F)"
"$tests" --nocapture floors | grep -v '^test \|^running\|^$'
if "$python" -c 'import torch' 2>/dev/null; then
    "$python" scripts/gpu_peers.py "$STERLING_FLOORS"
else
    echo "| PyTorch | | | not here | |"
fi
if "$python" -c 'import faiss' 2>/dev/null; then
    "$python" scripts/gpu_faiss.py "$STERLING_FLOORS"
else
    echo "| Faiss | | | not here | |"
fi
