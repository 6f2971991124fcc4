"""Plain data as YAML, in the order given, quoted wherever a reader could take it otherwise."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["to_yaml"]

_PLAIN = re.compile(r"[A-Za-z_./$][A-Za-z0-9_./${}:@=\-]*(?<!:)")
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n", "~"})


def to_yaml(value: Any, *, indent: int = 0) -> str:
    """Mappings, lists, strings, numbers, booleans and None; strings of several lines as blocks."""
    return "\n".join(_lines(value, indent)) + "\n"


def _lines(value: Any, indent: int) -> list[str]:
    space = " " * indent
    lines: list[str] = []
    if isinstance(value, dict):
        for key, each in value.items():
            lines += _entry(f"{space}{_scalar(key)}:", each, indent)
        return lines
    for each in value:
        inner = _lines(each, indent + 2) if isinstance(each, dict | list) and each else None
        if inner is None:
            lines += _entry(f"{space}-", each, indent)
        else:
            lines += [f"{space}- {inner[0].lstrip()}", *inner[1:]]
    return lines


def _entry(head: str, value: Any, indent: int) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [head, *_lines(value, indent + 2)]
    if isinstance(value, str) and "\n" in value:
        body = [f"{' ' * (indent + 2)}{line}".rstrip() for line in value.rstrip("\n").split("\n")]
        return [f"{head} |", *body]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)
