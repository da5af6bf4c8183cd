"""Writes TOML: nested mappings, lists of mappings as arrays of tables, everything else as values.

>>> print(written({"name": "shop", "tables": [{"name": "a"}], "value": {"constants": {"w": 0.5}}}), end="")
name = "shop"
<BLANKLINE>
[[tables]]
name = "a"
<BLANKLINE>
[value.constants]
w = 0.5
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from .errors import ExportError

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")


def written(tree: Mapping[str, Any]) -> str:
    """Returns the text of a TOML file."""
    return "\n".join(_blocks(tree, ())).lstrip("\n")


def _blocks(tree: Mapping[str, Any], path: tuple[str, ...], heading: str = "") -> list[str]:
    plain = {key: value for key, value in tree.items() if not _is_table(value)}
    lines = [f"{_key(key)} = {_value(key, value)}\n" for key, value in plain.items()]
    blocks = [heading + "".join(lines)] if lines or heading.startswith("[[") else []
    for key, value in tree.items():
        inner = (*path, key)
        name = ".".join(map(_key, inner))
        if isinstance(value, Mapping):
            blocks += _blocks(value, inner, f"[{name}]\n")
        elif _is_table(value):
            for entry in value:
                blocks += _blocks(entry, inner, f"[[{name}]]\n")
    return blocks


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))


def _key(key: str) -> str:
    return key if _BARE.match(key) else _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(key, one) for one in value) + "]"
    raise ExportError(f"`{key}`: {value!r} is no finite number, text, truth value or list of these")
