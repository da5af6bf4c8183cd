#!/usr/bin/env bash
# Kills a writer of the journal a thousand times with SIGKILL and looks whether what it was told is durable is there.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo test --locked --test it journal::nothing_that_was_acknowledged_is_lost_by_a_thousand_kills -- --exact --ignored
