#!/usr/bin/env python3
"""Draws comment lines and messages of the sources at random, to be read without the code.

    scripts/draw_lines.py 7             100 comment lines and 40 log or error messages, drawn with seed 7

A reader who has not seen the code should understand each line without opening it. Tests, benches and generated files are left
out; a comment line is shown with the sentence that it belongs to.
"""

import argparse
import random
import re
import subprocess
from pathlib import Path

import check_docs

COMMENTS, MESSAGES = 100, 40
SKIPPED = re.compile(r"^(?:tests|benches|crates/[^/]+/(?:benches|tests))/|/tests?(?:/|\.(?:rs|py)$)|/test_")
# A string literal that is the text of an error or of a log line.
MESSAGE = re.compile(r"(?:Error::\w+\(|tracing::(?:error|warn|info)!\(|Error\(|format!\(|format_args!\(|Err\(|\.within\()[^\"();]*$")


def sources() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.py"], cwd=check_docs.ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split() if not SKIPPED.search(name)]


def lines_of(name: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Returns the comment lines and the messages of one file, each with its path and line."""
    source = (check_docs.ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".rs"):
        source = source.split("#[cfg(test)]\nmod tests {")[0]
    comments, messages = [], []
    lines = source.split("\n")
    for number, text in check_docs.PARSERS[Path(name).suffix](source):
        place = f"{name}:{number}"
        line = lines[number - 1]
        if re.match(r"\s*(?://|#|\"\"\")", line):
            comments += [(place, sentence) for sentence in check_docs.sentences(text) if len(sentence.split()) > 2]
        elif len(check_docs.plain(text).replace(check_docs.CODE, "").split()) < 3:
            continue  # A prefix, such as the name of the object.
        elif name.endswith(".rs"):
            before = "\n".join(lines[max(0, number - 3) : number])[: -len(line) or None] + line.split('"')[0]
            if MESSAGE.search(before):
                messages.append((place, text))
        elif "Error(" in line:
            messages.append((place, text))
    return comments, messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    seed = parser.parse_args().seed
    comments, messages = [], []
    for name in sources():
        of_file = lines_of(name)
        comments += of_file[0]
        messages += of_file[1]
    chance = random.Random(seed)
    for title, all_lines, count in (("comments", comments, COMMENTS), ("messages", messages, MESSAGES)):
        print(f"{count} of {len(all_lines)} {title}, seed {seed}")
        for place, text in sorted(chance.sample(all_lines, count)):
            print(f"  {place}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
