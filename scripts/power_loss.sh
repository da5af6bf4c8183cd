#!/usr/bin/env bash
# Simulates fifty power losses of a server that writes and merges, with copies of its mounted file system's image. Needs root,
# loop devices and mkfs.ext4.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_POWER_LOSSES=50 cargo test --release --locked --test it -- --include-ignored --nocapture --exact \
    chaos::nothing_that_was_acknowledged_is_lost_when_the_power_goes
