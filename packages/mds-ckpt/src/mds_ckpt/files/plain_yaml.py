"""Parse the YAML that training frameworks dump: mappings, lists, plain and quoted scalars.

Anchors, aliases, tags, block scalars and several documents are refused: no dump of a configuration
has them, and each has been the door of an attack. Duplicate keys are refused, sizes are bounded.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mds_ckpt.escape import printable

__all__ = ["YamlError", "parse"]

LONGEST = 4 << 20
DEEPEST = 32
_INT = re.compile(r"[-+]?\d{1,18}")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_STRANGE = "&*!|>%@`"


class YamlError(ValueError):
    """The text is not the YAML we accept; the message says why and in which line."""


def parse(data: bytes) -> Any:
    """The value that ``data`` holds.

    Args:
        data: UTF-8 text of one YAML document.

    Raises:
        YamlError: For anything but the plain subset.
    """
    if len(data) > LONGEST:
        raise YamlError(f"it has {len(data)} bytes, and {LONGEST} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise YamlError(f"it is not UTF-8 at byte {error.start}") from None
    if text.lstrip().startswith("---"):
        text = text.lstrip()[3:]
    flow = _without_comments(text).strip()
    if flow.startswith(("{", "[")):
        return _Flow(flow).whole()
    return _Block(text).whole()


def _scalar(word: str, line: int) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if word[0] in _STRANGE:
        raise YamlError(f"line {line}: '{printable(word[:40])}' is more than plain YAML")
    if word[0] == '"':
        try:
            return json.loads(word)
        except ValueError:
            raise YamlError(f"line {line}: a quoted text is broken") from None
    if word[0] == "'":
        if len(word) < 2 or word[-1] != "'":
            raise YamlError(f"line {line}: a quoted text is broken")
        return word[1:-1].replace("''", "'")
    if _INT.fullmatch(word):
        return int(word)
    return float(word) if _FLOAT.fullmatch(word) else word


def _without_comments(text: str) -> str:
    return "\n".join(_uncommented(line) for line in text.split("\n"))


def _uncommented(line: str) -> str:
    """The line without a comment, which begins with ``#`` behind a space and outside quotes."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1] in " \t"):
            return line[:at]
    return line


def _put(target: dict[str, Any], key: Any, value: Any, line: int) -> None:
    if not isinstance(key, str):
        key = str(key)
    if key in target:
        raise YamlError(f"line {line}: '{printable(key)}' stands there twice")
    target[key] = value


class _Flow:
    """``{a: 1, b: [2, 3],}`` over any number of lines; commas may trail."""

    _TOKEN = re.compile(
        r"\s*("
        r"\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'"  # quoted
        r"|[{}\[\],]|:(?=\s)"
        r"|[^\s{}\[\],:][^{}\[\],:\n]*"  # plain
        r")"
    )
    _END = re.compile(r"\s*\Z")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._token = ""
        self._next()

    def whole(self) -> Any:
        value = self._value(0)
        if self._token:
            raise self._error("something follows its end")
        return value

    def _error(self, what: str) -> YamlError:
        line = self._text.count("\n", 0, self._at) + 1
        return YamlError(f"line {line}: {what}")

    def _next(self) -> str:
        before = self._token
        if self._END.match(self._text, self._at):
            self._token = ""
            return before
        match = self._TOKEN.match(self._text, self._at)
        if match is None:
            raise self._error("this is no plain YAML")
        self._at = match.end()
        self._token = match[1].strip()
        return before

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise self._error("it is nested too deeply")
        if self._token == "{":
            return self._mapping(depth)
        if self._token == "[":
            return self._list(depth)
        if not self._token or self._token in "}],:":
            raise self._error("a value is missing")
        return _scalar(self._next(), self._line())

    def _mapping(self, depth: int) -> dict[str, Any]:
        self._next()
        found: dict[str, Any] = {}
        while self._token != "}":
            key = self._value(depth + 1)
            if self._token != ":":
                raise self._error("a colon is missing")
            self._next()
            _put(found, key, self._value(depth + 1), self._line())
            self._comma("}")
        self._next()
        return found

    def _list(self, depth: int) -> list[Any]:
        self._next()
        found = []
        while self._token != "]":
            found.append(self._value(depth + 1))
            self._comma("]")
        self._next()
        return found

    def _comma(self, end: str) -> None:
        if self._token == ",":
            self._next()
        elif self._token != end:
            raise self._error(f"neither a comma nor '{end}'")


class _Block:
    """Mappings and lists by indentation."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[int, int, str]] = []
        for number, line in enumerate(text.split("\n"), start=1):
            bare = _uncommented(line).rstrip()
            content = bare.lstrip(" ")
            if content:
                if content[0] == "\t":
                    raise YamlError(f"line {number}: it is indented with a tab")
                self._lines.append((number, len(bare) - len(content), content))
        self._at = 0

    def whole(self) -> Any:
        if not self._lines:
            return None
        value = self._value(self._lines[0][1], 0)
        if self._at < len(self._lines):
            raise YamlError(f"line {self._lines[self._at][0]}: its indentation fits nothing")
        return value

    def _value(self, indent: int, depth: int) -> Any:
        number, _, content = self._lines[self._at]
        if depth > DEEPEST:
            raise YamlError(f"line {number}: it is nested too deeply")
        if content == "-" or content.startswith("- "):
            return self._list(indent, depth)
        return self._mapping(indent, depth)

    def _is_at(self, indent: int) -> bool:
        return self._at < len(self._lines) and self._lines[self._at][1] == indent

    def _list(self, indent: int, depth: int) -> list[Any]:
        found = []
        while self._is_at(indent) and self._lines[self._at][2][:1] == "-":
            number, _, content = self._lines[self._at]
            rest = content[1:].strip()
            is_mapping = rest and rest[0] not in "{[\"'" and _key(rest) is not None
            if rest.startswith("- ") or is_mapping:
                # It begins on the dash's line: read it as if it stood on the next.
                inner = indent + len(content) - len(rest)
                self._lines[self._at] = (number, inner, rest)
                found.append(self._value(inner, depth + 1))
                continue
            self._at += 1
            found.append(self._inline(rest, number) if rest else self._below(indent, depth))
        return found

    def _mapping(self, indent: int, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._is_at(indent):
            number, _, content = self._lines[self._at]
            split = _key(content)
            if split is None:
                raise YamlError(f"line {number}: neither a key nor a list's item")
            key, rest = split
            self._at += 1
            value = self._inline(rest, number) if rest else self._below(indent, depth, is_key=True)
            _put(found, _scalar(key, number), value, number)
        return found

    def _below(self, indent: int, depth: int, *, is_key: bool = False) -> Any:
        """What is indented further; a list may stand as far left as its key."""
        if self._at >= len(self._lines):
            return None
        _, inner, content = self._lines[self._at]
        is_list = content == "-" or content.startswith("- ")
        if inner > indent or (is_key and is_list and inner == indent):
            return self._value(inner, depth + 1)
        return None

    def _inline(self, rest: str, number: int) -> Any:
        if rest[0] in "{[":
            return _Flow(rest).whole()
        return _scalar(rest, number)


_KEY = re.compile(r"(\"(?:[^\"\\]|\\.)*\"|'(?:[^']|'')*'|[^\s\"'{}\[\],#:][^:]*?)\s*:(?:\s+(.*))?")


def _key(content: str) -> tuple[str, str] | None:
    """A key and what follows it on its line; None if the line is none of a mapping."""
    match = _KEY.fullmatch(content)
    return None if match is None else (match[1], (match[2] or "").strip())
