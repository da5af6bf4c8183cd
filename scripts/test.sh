#!/usr/bin/env bash
# Installs the requirements of the tests and runs the short suite: formatting, lints, unit, integration and documentation tests,
# and the smoke tests in Python. With --all also the long suite, which takes hours: the tests marked `#[ignore = "long: …"]`,
# large random sweeps, complete fault tables, loom, sanitizers, and all tests in Python. CONTRIBUTING.md lists the content of
# both.
set -euo pipefail
cd "$(dirname "$0")/.."

need_redis() { ! command -v redis-server >/dev/null; }
need_cxx() { ! command -v g++ >/dev/null; }
need_python() { ! "${PYTHON:-python3}" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
need_nats() { ! command -v nats-server >/dev/null; }
need_chromium() { ! { command -v chromium && command -v chromedriver; } >/dev/null; }
need_typed() { ! { command -v curl && command -v openssl; } >/dev/null; }
need_promtool() { ! command -v promtool >/dev/null; }
need_image() { ! { command -v skopeo && command -v umoci && command -v runc; } >/dev/null; }
if { need_image || need_promtool || need_redis || need_nats || need_cxx || need_python || need_chromium || need_typed; } && command -v apt-get >/dev/null; then
    as_root=""
    [ "$(id -u)" = 0 ] || as_root=sudo
    $as_root apt-get update -q
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server nats-server g++ \
        python3-venv chromium chromium-driver curl openssl ca-certificates skopeo umoci runc prometheus
fi
if need_redis; then
    echo "redis-server is missing and could not be installed: the tests of the remote tier start it" >&2
    exit 1
fi
if need_nats; then
    echo "nats-server is missing and could not be installed: the tests of streams start it" >&2
    exit 1
fi
if need_cxx; then
    echo "g++ is missing and could not be installed: the tests of the GPU's kernels compile them for the host" >&2
    exit 1
fi
if need_python; then
    echo "Python 3.11 or later with venv is missing and could not be installed: the tests of the Python package need it" >&2
    exit 1
fi
if need_chromium; then
    echo "chromium with chromedriver is missing and could not be installed: the tests of the console drive it" >&2
    exit 1
fi
if need_typed; then
    echo "curl or openssl is missing and could not be installed: the tasks of docs/guide/tasks.md type them" >&2
    exit 1
fi

if need_promtool; then
    echo "promtool is missing and could not be installed: the tests of the alerts run it" >&2
    exit 1
fi
if need_image; then
    echo "skopeo, umoci or runc is missing and could not be installed: the tests of the container image read, unpack and start it" >&2
    exit 1
fi

all=$([ "${1:-}" = --all ] && echo --all || true)
"${PYTHON:-python3}" scripts/check_docs.py
"${PYTHON:-python3}" scripts/check_docs.py --words
scripts/build_docs.sh --no-rust
cargo fmt --check
cargo clippy --locked --workspace --all-targets --features full -- -D warnings
# The opposite setting of each feature: the short suite builds it, the long one lints it. The same for libraries that are used
# alone, without the features that the server enables.
if [ "$all" ]; then
    cargo clippy --locked --workspace --no-default-features -- -D warnings
    cargo clippy --locked -p sterling-storage -p sterling-index -p sterling-embedding -p sterling-graph -- -D warnings
else
    cargo check --locked --workspace --no-default-features
fi
# The Python tests compare the recorded requests and answers of the integration tests with the API description.
rm -rf target/exchanges
export TEST_EXCHANGES=$PWD/target/exchanges
if [ "$all" ]; then
    export STERLING_TEST_FAULTS=1 STERLING_BATCHES=20000 STERLING_RANDOM_GRAPHS=2000
fi
# Packages each crate as for publication, with everything that it refers to; the long suite also builds it from these files only.
packaged() { cargo package --locked --workspace --allow-dirty --quiet "$@"; }
others() {
    scripts/test_python.sh $all --ignore=tests/test_exchanges.py
    cargo test --locked --workspace --doc --features full
    RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --quiet --features full
    if [ "$all" ]; then packaged; else packaged --no-verify; fi
}
tests=(cargo test --locked --workspace --lib --bins --tests --examples --features full)
"${tests[@]}" --no-run
# Tests wait for servers and brokers a third of their time: two more threads than cores keep the cores busy, and what does not
# need their results runs beside them, and is reported when it ends. The long suite measures, so it does one after the other.
export RUST_TEST_THREADS=$(($(getconf _NPROCESSORS_ONLN) + 2))
if [ "$all" ]; then
    "${tests[@]}" -- --include-ignored
    others
    scripts/test_sanitized.sh
    scripts/test_loom.sh
else
    said=$PWD/target/others.log
    others >"$said" 2>&1 &
    beside=$!
    finish() {
        local status=$?
        trap - EXIT
        wait "$beside" || status=$?
        cat "$said"
        [ "$status" = 0 ] || exit "$status"
    }
    trap finish EXIT
    "${tests[@]}"
    finish
fi
PYTHONPATH=python target/python/bin/python -m pytest -q -p no:cacheprovider python/tests/test_exchanges.py
