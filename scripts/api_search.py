#!/usr/bin/env python3
"""Writes pages that list all public items of the crates and of the Python package, so that the book's search finds them.

    scripts/api_search.py target/docs-src --python target/docs-api --rust target/doc

Adds `reference/api-python.md` and, with --rust, `reference/api-rust.md` to a copy of `docs/`, and both to its table of contents. Reads
the output of pdoc and of `cargo doc`. Each item links to its rendered documentation. Paths are separated by blanks, because the book's
search finds words. scripts/build_docs.sh calls it.
"""

import argparse
import html
import json
import re
from pathlib import Path

ITEM = re.compile(r"<dt><a class=\"(\w+)\" href=\"([^\"]+)\"[^>]*>(.*?)</a>.*?</dt>(?:<dd>(.*?)</dd>)?", re.DOTALL)
AFTER = "- [Library APIs](reference/libraries.md)\n"


def text(markup: str) -> str:
    """Returns the plain text of HTML, escaped for Markdown."""
    plain = html.unescape(re.sub(r"<[^>]+>", "", markup))
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(plain.split()))


def entry(name: str, link: str, summary: str) -> str:
    plain = text(summary)
    return f"- [`{name}`]({link})" + (f": {plain}" if plain else "")


def rust_module(root: Path, folder: Path, lines: list[str]) -> None:
    """Appends the items of a module and of the modules below it."""
    path = folder.relative_to(root)
    items = ITEM.findall((folder / "index.html").read_text(encoding="utf-8"))
    own = [item for item in items if item[0] != "mod" and "/" not in item[1]]
    if own:
        lines += ["", f"## Rust: {' › '.join(path.parts)}", ""]
    for _, link, name, summary in own:
        plain = html.unescape(re.sub(r"<[^>]+>", "", name)).replace("\u200b", "")
        lines.append(entry(plain, f"../rust/{path.as_posix()}/{link}", summary))
    for kind, link, _, _ in items:
        if kind == "mod" and link.endswith("/index.html") and not link.startswith(".."):
            rust_module(root, folder / link.removesuffix("/index.html"), lines)


def rust_page(root: Path) -> str:
    lines = ["# Rust items", "", "All public items of the crates, with links to their documentation."]
    for crate in sorted(root.glob("sterling*/index.html")):
        rust_module(root, crate.parent, lines)
    return "\n".join(lines) + "\n"


def python_page(root: Path) -> str:
    source = (root / "search.js").read_text(encoding="utf-8")
    start = source.index("const docs = ") + len("const docs = ")
    found = json.JSONDecoder().raw_decode(source, start)[0]
    docs = found if isinstance(found, list) else list(found["documentStore"]["docs"].values())  # A prebuilt index, if pdoc finds Node.
    classes = {doc["fullname"] for doc in docs if doc["kind"] == "class"}
    groups: dict[str, list[str]] = {"Python: sterling": []}
    for doc in docs:
        name, owner = doc["fullname"], doc["fullname"].rpartition(".")[0]
        if name.endswith(".__init__"):
            continue
        title = next((f"Python: {c.replace('.', ' › ')}" for c in (name, owner) if c in classes), "Python: sterling")
        summary = re.split(r"</p>|(?<=\.)\s", doc["doc"], maxsplit=1)[0]
        anchor = f"#{doc['qualname']}" if doc.get("qualname") else ""
        link = f"../python/{doc['modulename'].replace('.', '/')}.html{anchor}"
        groups.setdefault(title, []).append(entry(name.rpartition(".")[2], link, summary))
    lines = ["# Python items", "", "All public items of the package `sterling`, with links to their documentation."]
    for title, entries in groups.items():
        lines += ["", f"## {title}", "", *entries]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--rust", type=Path)
    options = parser.parse_args()
    pages = {"Python items": ("api-python.md", python_page(options.python))}
    if options.rust:
        pages["Rust items"] = ("api-rust.md", rust_page(options.rust))
    summary = options.book / "SUMMARY.md"
    contents = summary.read_text(encoding="utf-8")
    if AFTER not in contents:
        parser.error(f"{summary}: no line `{AFTER.strip()}`")
    added = ""
    for title, (name, page) in pages.items():
        (options.book / "reference" / name).write_text(page, encoding="utf-8")
        added += f"  - [{title}](reference/{name})\n"
    summary.write_text(contents.replace(AFTER, AFTER + added), encoding="utf-8")


if __name__ == "__main__":
    main()
