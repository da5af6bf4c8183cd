#!/usr/bin/env bash
# Installs what the tests need and runs all of them: formatting, lints, unit, integration and documentation tests.
set -euo pipefail
cd "$(dirname "$0")/.."

need_redis() { ! command -v redis-server >/dev/null; }
if need_redis && command -v apt-get >/dev/null; then
    as_root=""
    [ "$(id -u)" = 0 ] || as_root=sudo
    $as_root apt-get update -q
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server
fi
if need_redis; then
    echo "redis-server is missing and could not be installed: the tests of the remote tier start it" >&2
    exit 1
fi

cargo fmt --check
cargo clippy --locked --all-targets -- -D warnings
cargo test --locked
RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet
