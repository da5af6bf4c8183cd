#!/usr/bin/env bash
# Kills a writer of the journal, and a server that writes, merges and receives publications, a thousand times each with SIGKILL,
# and checks that everything reported as durable is present once.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_KILLS=1000 STERLING_TEST_MERGE_KILLS=1000 cargo test --release --locked --test it -- --include-ignored --nocapture --exact \
    journal::nothing_that_was_acknowledged_is_lost_by_kill_9 \
    chaos::nothing_is_lost_or_twice_when_a_server_is_killed_in_merges_and_publications
