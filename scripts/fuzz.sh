#!/usr/bin/env bash
# Fuzzes every parser with mutated inputs, each for a number of CPU seconds, and prints one line for each:
#     scripts/fuzz.sh [SECONDS, 600] [TARGET...]
# STERLING_FUZZ_SEED selects other inputs (default 0). A failing input is written to target/fuzz: add it to tests/fuzz/corpus
# together with the fix.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds="${1:-600}"
shift || true

cargo test --release --locked --test fuzz --no-run || exit 1
program="$(cargo test --release --locked --test fuzz --no-run --message-format=json 2>/dev/null |
    grep '"name":"fuzz"' | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')"
if [ $# -gt 0 ]; then targets="$*"; else targets="$("$program" --list 2>/dev/null | sed -n 's/: test$//p' | grep -v every_target_is_run)"; fi

broken=0
for target in $targets; do
    said="$(STERLING_FUZZ_SECONDS="$seconds" "$program" --exact "$target" --nocapture 2>&1)"
    status=$?
    line="$(printf '%s\n' "$said" | grep -E "^$target: " | tail -1)"
    if [ $status -eq 0 ] && [ -n "$line" ]; then
        echo "$line, clean"
    else
        broken=$((broken + 1))
        echo "$target: BROKEN: ${line:-$(printf '%s\n' "$said" | tail -1)}"
    fi
done
exit $((broken > 0))
