#!/usr/bin/env bash
# Compares many random graphs, as programs, with an evaluation of their files: random_graphs.sh [COUNT] [FIRST]
# The test suite runs the first few hundred (crates/snapshot/src/sandbox/graphs.rs).
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_RANDOM_GRAPHS="${2:-0}:${1:-20000}" cargo test --locked -p sterling-snapshot --lib -- sandbox::graphs --nocapture
