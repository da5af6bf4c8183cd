#!/usr/bin/env bash
# Kills a writer of the journal a thousand times with SIGKILL and looks whether what it was told is durable is there.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_KILLS=1000 cargo test --locked --test it journal::nothing_that_was_acknowledged_is_lost_by_kill_9 -- --exact
