#!/usr/bin/env bash
# Fifty losses of power under a server that writes and merges: copies of the image of its file system, taken while it is mounted.
# Needs root, loop devices and mkfs.ext4.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_POWER_LOSSES=50 cargo test --release --locked --test it -- --include-ignored --nocapture --exact \
    chaos::nothing_that_was_acknowledged_is_lost_when_the_power_goes
