#!/usr/bin/env python3
"""Checks the documentation: width, sentence length, table cells, size, links, the table of contents and the word list.

    scripts/check_docs.py                     all pages, and the limits of the whole documentation
    scripts/check_docs.py docs/guide/gpu.md   these pages alone
    scripts/check_docs.py --sizes             also prints words, sentences, mean and longest sentence per page
    scripts/check_docs.py --wrap docs/guide/gpu.md      wraps the prose of these pages at 120 columns
    scripts/check_docs.py --site target/book  the links of the built site
    scripts/check_docs.py --words crates src  checks only the word list: comments and strings of .rs, .py, .sh, .js and .html files
    scripts/check_docs.py --words             the word list on all sources of the repository, as CI does
    scripts/check_docs.py --words --since main crates   only the lines that were added since a revision

The word list is `scripts/words.txt`; `scripts/words_allow.txt` holds the legitimate uses. The exit status is 1 if anything is found.
"""

import argparse
import fnmatch
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "docs"
COUNTED = ["README.md", "CONTRIBUTING.md", "models/README.md", "python/README.md"]  # beside every page of docs/
LINKED = COUNTED + ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "deploy/README.md"]
SOURCES = ["benches", "crates", "examples", "models", "python", "scripts", "src", "tests"]  # of the word list
GENERATED = ["docs/reference/cli.md"]  # written by scripts/cli_reference.py; not in the total
WIDTH_MAX = 120
MEAN_MAX = 18.0
SENTENCE_MAX = 30
CELL_MAX = 40
TOTAL_MAX = 58_800  # 60 % of the 98,000 words before the book
CODE = "\N{BLACK DIAMOND}"  # Stands for a code span: one word, which may begin a sentence.

FENCE = re.compile(r"^\s*(```+|~~~+)")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
RAW = re.compile(r"^\s*<(?!https?:)[A-Za-z!/]")
LINK = re.compile(r"!?\[([^\[\]]*(?:\[[^\]]*\][^\[\]]*)?)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
DEFINITION = re.compile(r"^\s{0,3}\[([^\]]+)\]:\s+(\S+)")
SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
SENTENCE_END = re.compile(rf"(?<=[.!?])[\"')\]*]*\s+(?=[\"'(\[*]*[A-Z0-9{CODE}])")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|al|etc|no)\.$", re.IGNORECASE)


@dataclass
class Page:
    """One Markdown file, split into prose blocks, table cells, headings and links; each with its line number."""

    path: Path
    text: str
    blocks: list[tuple[int, str]] = field(default_factory=list)
    cells: list[tuple[int, str]] = field(default_factory=list)
    headings: list[tuple[int, str]] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    wide: list[tuple[int, int]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return relative(self.path)

    @property
    def words(self) -> int:
        """Number of words; table borders and dashes do not count."""
        return sum(1 for word in self.text.split() if any(c.isalnum() for c in word))

    def sentences(self) -> list[tuple[int, str]]:
        return [(line, s) for line, block in self.blocks for s in sentences(prose(block))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def prose(text: str) -> str:
    """Returns the text as a reader sees it: code spans as one placeholder, links as their text, without emphasis."""
    text = SPAN.sub(CODE, text)
    text = LINK.sub(lambda m: "" if m.group(0).startswith("!") else m.group(1), text)
    text = re.sub(r"<[^>\s][^>]*>", " ", text)
    return " ".join(text.replace("**", "").replace("\\|", "|").split())


def sentences(text: str) -> list[str]:
    parts: list[str] = []
    for part in SENTENCE_END.split(text):
        if parts and ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + part
        elif part.strip():
            parts.append(part.strip())
    return parts


def count(text: str) -> int:
    return sum(1 for word in text.split() if any(c.isalnum() or c == CODE for c in word))


def slug(title: str) -> str:
    """Returns the anchor that mdBook and GitHub give a heading."""
    plain = LINK.sub(r"\1", title).replace("`", "").replace("*", "")
    return "".join(c for c in plain.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def row_cells(line: str) -> list[str]:
    cells, cell, ticks = [], "", False
    body = line.strip()
    for at, c in enumerate(body):
        if c == "`":
            ticks = not ticks
        if c == "|" and (at == 0 or body[at - 1] != "\\"):
            cells.append(cell)
            cell = ""
        else:
            cell += c
    return [c.strip() for c in cells[1:]] + ([cell.strip()] if cell.strip() else [])


def read(path: Path) -> Page:
    page = Page(path, path.read_text(encoding="utf-8"))
    fence, raw, block, start = "", False, [], 0

    def flush() -> None:
        if block:
            page.blocks.append((start, "\n".join(block)))
            block.clear()

    for number, line in enumerate(page.text.split("\n"), 1):
        mark = FENCE.match(line)
        if fence:
            if mark and mark.group(1).startswith(fence) and not line.strip().strip("`~"):
                fence = ""
            continue
        for anchor in re.findall(r"<[a-z0-9]+[^>]*\s(?:id|name)=\"([^\"]+)\"", line):
            page.anchors.add(anchor)
        if mark:
            flush()
            fence = mark.group(1)
        elif not line.strip():
            flush()
            raw = False
        elif raw or (not block and RAW.match(line)):
            raw = True
        elif heading := HEADING.match(line):
            flush()
            title = heading.group(2)
            if custom := re.search(r"\s*\{#([\w-]+)\}$", title):
                page.anchors.add(custom.group(1))
                title = title[: custom.start()]
            page.headings.append((number, title))
        elif line.lstrip().startswith("|"):
            flush()
            if not re.fullmatch(r"[\s|:-]+", line):
                page.cells += [(number, cell) for cell in row_cells(line)]
        elif definition := DEFINITION.match(line):
            flush()
            page.links.append((number, definition.group(2)))
        else:
            if ITEM.match(line):
                flush()
            if not block:
                start = number
            block.append(re.sub(r"^\s*(?:>\s?)*", "", ITEM.sub("", line)))
            if len(line) > WIDTH_MAX and " " in line.strip():
                page.wide.append((number, len(line)))
    flush()
    for line, text in page.blocks + page.cells + page.headings:
        page.links += [(line, m.group(2)) for m in LINK.finditer(SPAN.sub(CODE, text))]
    seen: dict[str, int] = {}
    for _, title in page.headings:
        anchor = slug(title)
        page.anchors.add(anchor if anchor not in seen else f"{anchor}-{seen[anchor]}")
        seen[anchor] = seen.get(anchor, 0) + 1
    return page


# --- the word list ------------------------------------------------------------------------------------------------------------


@dataclass
class Words:
    patterns: list[tuple[re.Pattern, str]]
    allowed: list[tuple[str, re.Pattern]]

    def findings(self, name: str, texts: list[tuple[int, str]]) -> list[str]:
        allowed = [pattern for glob, pattern in self.allowed if fnmatch.fnmatch(name, glob)]
        found = []
        for line, text in texts:
            for sentence in sentences(text):
                for pattern in allowed:
                    sentence = pattern.sub(CODE, sentence)
                for pattern, instead in self.patterns:
                    if match := pattern.search(sentence):
                        about = sentence[max(0, match.start() - 30) : match.end() + 30]
                        found.append(f"{name}:{line}: house word \"{match.group(0)}\" in \"{about}\"; use: {instead}")
        return found


def entries(path: Path, separator: str) -> list[tuple[str, str]]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pairs = [line.partition(separator) for line in lines if line and not line.startswith("#")]
    bad = [a for a, middle, b in pairs if not middle or not b.strip()]
    if bad:
        sys.exit(f"{relative(path)}: no \"{separator.strip()}\" in: {bad[0]}")
    return [(a.strip(), b.strip()) for a, _, b in pairs]


def word_list() -> Words:
    scripts = ROOT / "scripts"
    return Words(
        [(re.compile(a, re.IGNORECASE), b) for a, b in entries(scripts / "words.txt", " => ")],
        [(a, re.compile(b, re.IGNORECASE)) for a, b in entries(scripts / "words_allow.txt", ": ")],
    )


RUST = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)"""
    r"""|(?P<raw>\bb?r(?P<hashes>\#*)"(?P<rawtext>.*?)"(?P=hashes))"""
    r"""|(?P<string>b?"(?P<text>(?:[^"\\]|\\.)*)")"""
    r"""|(?P<char>b?'(?:[^'\\\n]|\\[^\n]{1,8}?)')""",
    re.DOTALL | re.VERBOSE,
)


def joined(pieces: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Joins comments on consecutive lines to one text; an empty comment line ends the text."""
    texts: list[tuple[int, str]] = []
    last = -1
    for line, piece in pieces:
        if texts and piece and line == last + 1:
            texts[-1] = (texts[-1][0], f"{texts[-1][1]} {piece}")
            last = line
        elif piece:
            texts.append((line, piece))
            last = line
    return texts


def plain(text: str) -> str:
    """Returns the text with format arguments as placeholders."""
    return re.sub(r"\$?\{[^{}]*\}", CODE, text.replace("{{", CODE).replace("}}", CODE))


def rust_texts(source: str) -> list[tuple[int, str]]:
    comments, strings = [], []
    for match in RUST.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        if comment := match.group("comment"):
            for ahead, piece in enumerate(comment.splitlines()):
                comments.append((line + ahead, re.sub(r"^\s*(?://[/!]?|/\*[*!]?|\*(?!/))|\*/$", "", piece).strip()))
        elif match.group("raw") or match.group("string"):
            text = match.group("rawtext") or match.group("text") or ""
            if " " in text:
                strings.append((line, re.sub(r"\\\n\s*", "", text).replace("\\n", " ")))
    return joined(outside_fences(comments)) + strings


def outside_fences(comments: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Returns the lines of comments without the examples of documentation comments."""
    kept, is_code = [], False
    for line, text in comments:
        if text.startswith("```"):
            is_code = not is_code
        elif not is_code:
            kept.append((line, text))
    return kept


def python_texts(source: str) -> list[tuple[int, str]]:
    comments, strings = [], []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append((token.start[0], token.string.lstrip("#!").strip()))
        elif token.type in (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)) and " " in token.string:
            strings.append((token.start[0], re.sub(r"^\w*(\"\"\"|'''|\"|')|(\"\"\"|'''|\"|')$", "", token.string)))
    return joined(comments) + strings


def shell_texts(source: str) -> list[tuple[int, str]]:
    lines = enumerate(source.splitlines(), 1)
    return joined([(n, line.lstrip()[1:].strip()) for n, line in lines if line.lstrip().startswith("#")])


SCRIPT = re.compile(r"""//(?P<comment>[^\n]*)|(?P<quote>["'`])(?P<text>(?:[^\\\n]|\\.)*?)(?P=quote)""")


def script_texts(source: str) -> list[tuple[int, str]]:
    texts = [(source.count("\n", 0, m.start()) + 1, m.group("comment"), m.group("text")) for m in SCRIPT.finditer(source)]
    comments = [(line, comment.strip()) for line, comment, _ in texts if comment]
    return joined(comments) + [(line, text) for line, _, text in texts if text and " " in text]


def html_texts(source: str) -> list[tuple[int, str]]:
    found = re.finditer(r">([^<>]+)<|(?:title|aria-label|placeholder)=\"([^\"]+)\"", source)
    return [(source.count("\n", 0, m.start()) + 1, (m.group(1) or m.group(2)).strip()) for m in found]


def page_texts(page: Page) -> list[tuple[int, str]]:
    return page.blocks + page.cells + page.headings


PARSERS = {".rs": rust_texts, ".py": python_texts, ".sh": shell_texts, ".js": script_texts, ".html": html_texts}


def texts_of(path: Path) -> list[tuple[int, str]]:
    if path.suffix == ".md":
        return page_texts(read(path))
    return PARSERS[path.suffix](path.read_text(encoding="utf-8"))


def added_lines(path: Path, revision: str) -> set[int]:
    command = ["git", "diff", "-U0", "--no-color", revision, "--", str(path)]
    diff = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    added: set[int] = set()
    for start, length in re.findall(r"^@@ [^@]*\+(\d+)(?:,(\d+))? @@", diff, re.MULTILINE):
        added |= set(range(int(start), int(start) + int(length or 1)))
    return added


def check_words(paths: list[str], since: str | None) -> list[str]:
    words, found = word_list(), []
    # Without paths, only sources are searched: `main` checks the pages of the documentation.
    suffixes = [*PARSERS, ".md"] if paths else [*PARSERS]
    files: list[Path] = []
    for path in [Path(p).resolve() for p in paths or [ROOT / name for name in SOURCES]]:
        under = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files += [p for p in under if p.suffix in suffixes and not re.search(r"/(?:target|\.[^/]+|__pycache__)/", f"/{relative(p)}")]
    for path in files:
        texts = [(line, prose(plain(text))) for line, text in texts_of(path)]
        hits = words.findings(relative(path), texts)
        if since and hits:
            added = added_lines(path, since)
            # A text is located by its first line: a comment whose first line is old is reported when that line changes.
            hits = [hit for hit in hits if int(hit.split(":")[1]) in added]
        found += hits
    return found


# --- pages --------------------------------------------------------------------------------------------------------------------


def check_page(page: Page, words: Words) -> list[str]:
    name, found = page.name, []
    found += [f"{name}:{line}: {width} columns, at most {WIDTH_MAX}" for line, width in page.wide]
    lengths = []
    for line, sentence in page.sentences():
        length = count(sentence)
        if length:
            lengths.append(length)
        if length > SENTENCE_MAX:
            found.append(f"{name}:{line}: sentence of {length} words, at most {SENTENCE_MAX}: {sentence[:70]}…")
    mean = sum(lengths) / len(lengths) if lengths else 0.0
    if mean > MEAN_MAX:
        found.append(f"{name}: mean sentence of {mean:.1f} words, at most {MEAN_MAX:g}")
    for line, cell in page.cells:
        if (length := len(cell.split())) > CELL_MAX:
            found.append(f"{name}:{line}: table cell of {length} words, at most {CELL_MAX}: {cell[:70]}…")
    if page.path.is_relative_to(BOOK) and len([1 for line in page.text.split("\n") if line.startswith("# ")]) < 1:
        found.append(f"{name}: no title (`# …`)")
    return found + words.findings(name, [(line, prose(text)) for line, text in page_texts(page)])


def check_links(page: Page, pages: dict[Path, Page]) -> list[str]:
    found = []
    for line, target in page.links:
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        where = f"{page.name}:{line}: link to {target}"
        if not path.exists():
            found.append(f"{where}: no such file")
        elif page.path.is_relative_to(BOOK) and not path.is_relative_to(BOOK):
            found.append(f"{where}: outside of the book; name the path in backticks instead")
        elif anchor and path.suffix == ".md":
            if path not in pages:
                pages[path] = read(path)
            if anchor not in pages[path].anchors:
                found.append(f"{where}: no such heading")
    return found


def check_summary(pages: dict[Path, Page]) -> list[str]:
    summary = BOOK / "SUMMARY.md"
    listed = [m.group(2) for m in LINK.finditer(summary.read_text(encoding="utf-8"))]
    found = [f"docs/SUMMARY.md: {target}: no such page" for target in listed if not (BOOK / target).is_file()]
    found += [f"docs/SUMMARY.md: {target} is listed twice" for target in sorted({t for t in listed if listed.count(t) > 1})]
    for path in pages:
        if path.is_relative_to(BOOK) and path != summary and path.relative_to(BOOK).as_posix() not in listed:
            found.append(f"{relative(path)}: not in docs/SUMMARY.md")
    return found


def wrapped(text: str) -> str:
    """Returns the page with its paragraphs and list items wrapped; tables, code, headings and HTML are unchanged."""
    lines: list[str] = []
    block: list[str] = []
    fence, raw = "", False

    def flush() -> None:
        if not block:
            return
        lead = re.match(r"\s*(?:>\s?)*", block[0]).group(0)
        item = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", block[0])
        first = item.group(0) if item else lead
        body = " ".join(line.strip().lstrip("> ") if ">" in lead else line.strip() for line in block)
        body = body[len(first.strip()) :].strip() if item else body.strip()
        rest = " " * len(first) if item else lead
        # A line must not begin with characters that Markdown reads as a list, a heading, a quotation or a table.
        body = re.sub(r" (?=(?:[-+*>|#]|\d+[.)]) )", "\N{NO-BREAK SPACE}", body)
        whole = textwrap.wrap(body, WIDTH_MAX, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False)
        lines.extend(line.replace("\N{NO-BREAK SPACE}", " ") for line in whole)
        block.clear()

    for line in text.split("\n"):
        mark = FENCE.match(line)
        if fence:
            lines.append(line)
            if mark and mark.group(1).startswith(fence) and not line.strip().strip("`~"):
                fence = ""
        elif mark or not line.strip() or raw or HEADING.match(line) or line.lstrip().startswith("|") or DEFINITION.match(line) or (not block and RAW.match(line)):
            flush()
            lines.append(line)
            fence = mark.group(1) if mark else ""
            raw = bool(line.strip()) and (raw or bool(RAW.match(line)))
        else:
            if ITEM.match(line):
                flush()
            block.append(line)
    flush()
    return "\n".join(lines)


def check_site(site: Path) -> list[str]:
    """Checks the links between the rendered pages; links into `rust/` and `python/` only if these were rendered too."""
    ids: dict[Path, set[str]] = {}
    found = []
    for page in sorted(site.rglob("*.html")):
        own = page.relative_to(site)
        if own.parts[0] in ("rust", "python", "print.html", "toc.html", "404.html"):
            continue
        for link in re.findall(r'<a [^>]*href="([^"]+)"', page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            target = target / "index.html" if target.is_dir() else target
            inside = target.relative_to(site).parts[0] if target.is_relative_to(site) else ""
            if inside in ("rust", "python") and not (site / inside).is_dir():
                continue
            if not target.is_file():
                found.append(f"{own}: link to {link}: no such page")
            elif anchor and target.suffix == ".html":
                if target not in ids:
                    ids[target] = set(re.findall(r'\sid="([^"]+)"', target.read_text(encoding="utf-8")))
                if anchor not in ids[target]:
                    found.append(f"{own}: link to {link}: no such heading")
    return found


def book_pages() -> list[Path]:
    return sorted(p for p in BOOK.rglob("*.md") if p.name != "SUMMARY.md")


def sizes(pages: list[Page]) -> None:
    print(f"{'words':>7} {'sentences':>9} {'mean':>5} {'max':>4}  page")
    for page in pages:
        lengths = [n for _, s in page.sentences() if (n := count(s))]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        print(f"{page.words:7} {len(lengths):9} {mean:5.1f} {max(lengths, default=0):4}  {page.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="pages; with --words also files and folders of sources")
    parser.add_argument("--words", action="store_true", help="the word list alone")
    parser.add_argument("--since", metavar="REVISION", help="with --words: only lines that were added since this revision")
    parser.add_argument("--site", metavar="FOLDER", type=Path, help="checks the links of the built site instead")
    parser.add_argument("--wrap", action="store_true", help="wraps the prose of the pages at 120 columns")
    parser.add_argument("--sizes", action="store_true", help="prints the sizes of the pages")
    options = parser.parse_args()
    if options.wrap:
        for path in map(Path, options.paths):
            path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    if options.site:
        found = check_site(options.site.resolve())
    elif options.words:
        found = check_words(options.paths, options.since)
    else:
        chosen = [Path(p).resolve() for p in options.paths]
        checked = chosen or book_pages() + [ROOT / name for name in COUNTED]
        pages = {path: read(path) for path in checked}
        words, found = word_list(), []
        for path in checked:
            found += check_page(pages[path], words)
        linked = checked if chosen else checked + [ROOT / name for name in LINKED if name not in COUNTED and (ROOT / name).is_file()]
        cache = dict(pages)
        for path in linked:
            found += check_links(cache.get(path) or read(path), cache)
        if not chosen:
            found += check_summary(pages)
            total = sum(page.words for page in pages.values() if page.name not in GENERATED)
            if total > TOTAL_MAX:
                found.append(f"the documentation has {total} words, at most {TOTAL_MAX}")
        if options.sizes:
            sizes([pages[path] for path in checked])
            print(f"{sum(page.words for page in pages.values()):7} words in {len(checked)} pages")
    print("\n".join(found), end="\n" if found else "")
    print(f"{len(found)} findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
