#!/usr/bin/env bash
# Runs all GPU checks on a machine with a GPU and without Rust: `scripts/gpu-check.sh TESTS BENCH [CARD]`.
# TESTS is the program that `cargo test --release --test gpu --no-run` prints, BENCH that of `cargo bench --bench gpu_floors
# --no-run`, both built elsewhere; they need this checkout for its models.
# First the test suite, one process per test, so that a test that loses the GPU does not affect the next one. Then
# compute-sanitizer, if it is installed. Then a table: the figures of docs/benchmarks/gpu.md, kernels compared with their lower
# bounds, complete passes, and PyTorch and Faiss if they are installed.
#
#   STERLING_FLOORS=1000000,10000000   numbers of items of the table
#   PARTS="suite sanitizers figures floors training peers"   steps to run; "training" alone checks and times training steps
#   JOBS=8                             concurrent tests
#   TOOLS="memcheck racecheck synccheck"   tools of compute-sanitizer
#   CARD=emulated                      runs everything on the emulation with few items: tests the script, its times mean nothing
set -euo pipefail
cd "$(dirname "$0")/.."
tests=${1:?the test program}
bench=${2:?the benchmark program}
card=${3:-cuda:0}
python=${PYTHON:-python3}
parts=" ${PARTS:-suite sanitizers figures floors training peers} "
jobs=${JOBS:-8}

git log -1 --format='commit %h, %cs' 2>/dev/null || true
if [ "$card" = emulated ]; then
    export STERLING_FLOORS=${STERLING_FLOORS:-3000}
else
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || { echo "no card, or no driver" >&2; exit 1; }
    # NVRTC, if a Python package contains it.
    nvrtc=$("$python" -c 'import nvidia, os; print(os.path.join(list(nvidia.__path__)[0], "cu13", "lib"))' 2>/dev/null || true)
    export LD_LIBRARY_PATH="${nvrtc:+$nvrtc:}/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}"
    export STERLING_TEST_DEVICE=$card STERLING_FLOORS=${STERLING_FLOORS:-1000000,10000000}
fi

# Runs each test that passes the grep patterns with the given command; prints failures. Under a sanitizer,
# tests without GPU work count neither as passed nor as failed.
each_test() {
    local without=$1 logs failed=0 all elsewhere=0
    shift
    logs=$(mktemp -d)
    all=$("$tests" --list 2>/dev/null | sed -n 's/: test$//p' | grep -vE "$without")
    printf '%s\n' "$all" | xargs -P "$jobs" -I{} sh -c '
        log=$0/$(echo {} | tr -c "a-z0-9\n" -)
        "$@" --include-ignored --test-threads 1 --exact {} >"$log" 2>&1 && rm "$log" || echo "exit status $?" >>"$log"' "$logs" "$@" "$tests" || true
    for log in "$logs"/*; do
        [ -f "$log" ] || continue
        if grep -q 'terminated before first instrumented API call' "$log"; then
            elsewhere=$((elsewhere + 1))
            continue
        fi
        failed=$((failed + 1))
        echo "-- failed: $(basename "$log")"
        tail -n 40 "$log"
    done
    echo "== $(($(printf '%s\n' "$all" | wc -l) - failed - elsewhere)) passed, $failed failed"
    [ "$failed" = 0 ]
}

failed=0
if [[ $parts = *" suite "* ]]; then
    echo "== kernels, launches and whole passes on $card"
    # One test opens the GPU first, so that kernels are compiled once.
    timeout 120 "$tests" --test-threads 1 --exact scan::lists_are_scored_and_scanned_as_on_the_cpu
    each_test kernels_stay_within_their_memory timeout 300 || failed=1
fi
if [[ $parts = *" sanitizers "* ]]; then
    if [ "$card" != emulated ] && command -v compute-sanitizer >/dev/null; then
        for tool in ${TOOLS:-memcheck racecheck synccheck}; do
            echo "== $tool"
            # Rates that are measured under a sanitizer are meaningless.
            each_test 'nothing_leaves_its_memory|whole_pass|two_hundred|calibrate' \
                timeout 300 compute-sanitizer --tool "$tool" --error-exitcode 1 || failed=1
        done
    else
        echo "== compute-sanitizer is not here, or there is no card for it: not run"
    fi
fi
if [[ $parts = *" figures "* ]]; then
    echo "== figures on $card, $(date -u +%F)"
    "$bench" figures | grep '^|'
fi
if [[ $parts = *" floors "* ]]; then
    echo "== floors on $card, $(date -u +%F)"
    "$bench" floors | grep -v '^$'
fi
if [[ $parts = *" training "* ]]; then
    if [[ $parts != *" suite "* ]]; then
        echo "== training steps on $card: bits of the CPU"
        timeout 600 "$tests" --include-ignored --test-threads 1 learn:: || failed=1
    fi
    echo "== training steps on $card, $(date -u +%F): FBGEMM's time over ours should be at least 0.8, ours at least 50 % of the floor"
    "$bench" training | grep -v '^$'
    if "$python" -c 'import fbgemm_gpu' 2>/dev/null; then
        "$python" scripts/gpu_train_peers.py $([ "$card" = emulated ] && echo --tiny --device cpu)
    else
        echo "| FBGEMM | | | not here | |"
    fi
fi
if [[ $parts = *" peers "* ]]; then
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
fi
exit "$failed"
