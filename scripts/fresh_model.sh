#!/usr/bin/env bash
# Compares random updates and requests with a plain map: COUNT operations (default 100,000) on views in one process, and COUNT
# answers of a server that is merged, restarted and killed in between. Both stop at the first difference.
# usage: scripts/fresh_model.sh [COUNT]
set -euo pipefail
cd "$(dirname "$0")/.."
count=${1:-100000}
STERLING_TEST_OPERATIONS=$count STERLING_TEST_ANSWERS=$count cargo test --release --locked --test it -- --nocapture --exact \
    fresh::many_operations_are_those_of_a_plain_map \
    served_model::every_answer_of_a_server_is_that_of_a_plain_map_at_its_position
