#!/usr/bin/env bash
# A hundred thousand random updates, with questions between them, against a plain map.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --release --locked --test it fresh::a_hundred_thousand_operations_against_a_plain_map -- --exact --ignored
