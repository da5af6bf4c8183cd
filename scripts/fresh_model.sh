#!/usr/bin/env bash
# A hundred thousand random updates, with questions between them, against a plain map.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_OPERATIONS=100000 cargo test --release --locked --test it fresh::many_operations_are_those_of_a_plain_map -- --exact
