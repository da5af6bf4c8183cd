#!/usr/bin/env bash
# Two routers over three shards of two servers each, while versions flip two hundred times and each time a server is killed, stopped or
# ended: every answer must be wholly of one version, and none may be lost.
set -euo pipefail
cd "$(dirname "$0")/.."
STERLING_TEST_FLIPS="${FLIPS:-200}" cargo test --release --locked --test it -- --nocapture --exact \
    routers::every_answer_is_of_one_version_while_versions_flip_and_servers_are_killed_and_stopped
