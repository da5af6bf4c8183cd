#!/usr/bin/env bash
# Runs the models of tests/loom with every order of their steps; building loom takes half a minute, in its own target folder.
set -euo pipefail
cd "$(dirname "$0")/.."
RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test --locked --release -p sterling-loom "$@"
