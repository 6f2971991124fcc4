"""Read one huge record a piece at a time: its bytes are in memory once, its text never whole.

A document of 100 MB, parsed as any other, would be there five times over: the line, the decoded
line, the text, the normalised text, the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from mds_data.preprocess.records import RecordError

__all__ = ["LONG_RECORD", "LongText", "long_members"]

LONG_RECORD = 2**23
"""Bytes from which a record is read in pieces."""
_PIECE = 2**20
_LONG_STRING = 2**20
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BLANK = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[^\s,\]}\[{\"]++")
_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[\]{}]', re.DOTALL)


class LongText:
    """A long text inside a record's bytes.

    Args:
        data: The record.
        start: Where the text begins.
        stop: Where it ends.
        escaped: It is the inside of a JSON string; else it is plain text.
    """

    def __init__(self, data: bytes, start: int, stop: int, *, escaped: bool) -> None:
        self._data = data
        self._start = start
        self._stop = stop
        self._escaped = escaped

    def pieces(self) -> Iterator[str]:
        """Yield the text in pieces of about a MB.

        Raises:
            RecordError: It is no UTF-8, or holds a broken escape or half a surrogate pair.
        """
        position = self._start
        while position < self._stop:
            end = self._cut(position)
            yield self._decoded(position, end)
            position = end

    def text(self) -> str:
        """Return the whole text."""
        return "".join(self.pieces())

    def _cut(self, position: int) -> int:
        """Return where a piece may end: after a space, which no escape and no character holds."""
        end = position + _PIECE
        if end >= self._stop:
            return self._stop
        space = self._data.rfind(b" ", position, end)
        if space < 0:
            space = self._data.find(b" ", end, self._stop)
        return self._stop if space < 0 else space + 1

    def _decoded(self, start: int, end: int) -> str:
        piece = bytes(self._data[start:end])
        try:
            if not self._escaped:
                return piece.decode("utf-8").replace("\r\n", "\n")
            text: str = json.loads((b'"' + piece + b'"').decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RecordError(
                "broken", f"not UTF-8 at byte {start + error.start + 1} of the record"
            ) from None
        except ValueError as error:
            raise RecordError("broken", f"not JSON: {error}") from None
        if b"\\u" in piece:
            _check_pairs(text)
        return text


def _check_pairs(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            "surrogate", f"half a surrogate pair (U+{ord(text[error.start]):04X}), which is no text"
        ) from None


def long_members(data: bytes) -> dict[str, Any]:
    """Parse one huge line of JSON; its long strings become `LongText`.

    Raises:
        RecordError: It is no JSON object.
    """
    position = _after_blank(data, 0)
    if data[position : position + 1] != b"{":
        raise RecordError("broken", "not a JSON object")
    members: dict[str, Any] = {}
    position = _after_blank(data, position + 1)
    if data[position : position + 1] == b"}":
        return _ended(data, position + 1, members)
    while True:
        key, position = _string(data, position)
        name = key.text() if isinstance(key, LongText) else key
        position = _expect(data, position, b":")
        members[name], position = _value(data, position)
        position = _after_blank(data, position)
        if data[position : position + 1] == b"}":
            return _ended(data, position + 1, members)
        position = _expect(data, position, b",")


def _ended(data: bytes, position: int, members: dict[str, Any]) -> dict[str, Any]:
    if _after_blank(data, position) != len(data):
        raise RecordError("broken", f"not JSON: extra data at byte {position + 1}")
    return members


def _after_blank(data: bytes, position: int) -> int:
    match = _BLANK.match(data, position)
    return match.end() if match else position


def _expect(data: bytes, position: int, sign: bytes) -> int:
    """Return where to go on after a sign and the blanks around it."""
    position = _after_blank(data, position)
    if data[position : position + 1] != sign:
        raise RecordError("broken", f"not JSON: {sign.decode()!r} expected at byte {position + 1}")
    return _after_blank(data, position + 1)


def _string(data: bytes, position: int) -> tuple[str | LongText, int]:
    match = _STRING.match(data, position)
    if match is None:
        raise RecordError("broken", f"not JSON: a string expected at byte {position + 1}")
    start, end = match.span()
    text = LongText(data, start + 1, end - 1, escaped=True)
    return (text if end - start > _LONG_STRING else text.text()), end


def _value(data: bytes, position: int) -> tuple[Any, int]:
    first = data[position : position + 1]
    if first == b'"':
        return _string(data, position)
    end = _container_end(data, position) if first in {b"[", b"{"} else _scalar_end(data, position)
    try:
        return json.loads(bytes(data[position:end])), end
    except (ValueError, RecursionError) as error:
        raise RecordError("broken", f"not JSON: {error}") from None


def _scalar_end(data: bytes, position: int) -> int:
    match = _SCALAR.match(data, position)
    if match is None:
        raise RecordError("broken", f"not JSON: a value expected at byte {position + 1}")
    return match.end()


def _container_end(data: bytes, position: int) -> int:
    depth = 0
    for match in _BRACKET.finditer(data, position):
        sign = match.group() if match.end() - match.start() == 1 else b""
        depth += (sign in {b"[", b"{"}) - (sign in {b"]", b"}"})
        if depth == 0 and sign:
            return match.end()
    raise RecordError("broken", f"not JSON: a bracket at byte {position + 1} is never closed")
