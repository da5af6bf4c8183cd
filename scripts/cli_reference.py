#!/usr/bin/env python3
"""Writes docs/reference/cli.md from the `--help` of every command of a built binary.

    scripts/cli_reference.py target/release/sterling           writes the page
    scripts/cli_reference.py target/release/sterling --check   fails if the page is not current
"""

import argparse
import re
import subprocess
import sys
import textwrap
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs/reference/cli.md"
WIDTH = 118
HEAD = """# Command line

This page lists the commands of `sterling` with their options. `scripts/cli_reference.py target/release/sterling` writes
it from the `--help` of a build with all features. [Configuration](configuration.md) lists the keys and environment
variables of `serve` and `route`.

"""


def help_of(program: str, command: list[str]) -> str:
    # A clean environment: `--help` prints the values of variables that are set.
    run = subprocess.run([program, *command, "-h"], capture_output=True, text=True, check=True, env={})
    return run.stdout.rstrip()


def commands_of(text: str) -> list[tuple[str, str]]:
    block = re.search(r"^Commands:\n((?:  .*\n?)+)", text, re.MULTILINE)
    found = re.findall(r"^  ([\w-]+) +(.*)$", block.group(1), re.MULTILINE) if block else []
    return [(name, about) for name, about in found if name != "help"]


def wrapped(text: str) -> str:
    """Wraps long descriptions of options; continuation lines start below the description's first word."""
    lines = []
    for line in text.splitlines():
        option = re.match(r"\s+(?:-\S.*?|<\S+>.*?|\[\S+\].*?|[a-z][\w-]*)\s{2,}(?=\S)", line)
        indent = " " * (option.end() if option else len(line) - len(line.lstrip()))
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def sections(program: str, command: list[str], depth: int) -> list[str]:
    text = help_of(program, command)
    title = " ".join(command)
    parts = [f"{'#' * depth} `sterling {title}`\n\n```text\n{wrapped(text)}\n```\n"]
    for name, _ in commands_of(text):
        parts += sections(program, [*command, name], depth + 1)
    return parts


def page(program: str) -> str:
    commands = commands_of(help_of(program, []))
    rows = "".join(f"| [`{name}`](#sterling-{name}) | {about.replace('|', chr(92) + '|')} |\n" for name, about in commands)
    bodies = [part for name, _ in commands for part in sections(program, [name], 2)]
    return HEAD + "| command | purpose |\n|---|---|\n" + rows + "\n" + "\n".join(bodies)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the binary")
    parser.add_argument("--check", action="store_true", help="compares the page instead of writing it")
    options = parser.parse_args()
    made = page(options.program)
    if not options.check:
        PAGE.write_text(made, encoding="utf-8")
    elif made != PAGE.read_text(encoding="utf-8"):
        print(f"docs/reference/cli.md is not current: run scripts/cli_reference.py {options.program}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
