"""From a record's bytes to the texts in it, or to the problem that it is. Touches no files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ERROR_KINDS",
    "HUGE",
    "Problem",
    "ProblemKind",
    "json_object",
    "member_sentences",
    "member_text",
    "notes",
    "plain_text",
]

ProblemKind = Literal[
    "broken", "no-key", "not-text", "surrogate", "column", "refused", "empty", "nul", "huge"
]

ERROR_KINDS: frozenset[ProblemKind] = frozenset(
    {"broken", "no-key", "not-text", "surrogate", "column", "refused"}
)
"""These stop the work, or are skipped by ``--on-error skip``; the others are only counted."""
HUGE = 8 * 2**20
"""Characters; longer documents are mentioned in the report."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something about one document that its owner will want to know."""

    file: str
    line: int
    kind: ProblemKind
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.detail}"


class RecordError(ValueError):
    """A record holds no usable text."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: ProblemKind = kind


def json_object(data: bytes) -> dict[str, object]:
    """Parse one JSON line.

    Raises:
        RecordError: It is no UTF-8, no JSON, or no object.
    """
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError("broken", f"not UTF-8 at byte {error.start + 1} of the line") from None
    except RecursionError:
        raise RecordError("broken", "JSON nested too deeply") from None
    except ValueError as error:
        hint = "; the file looks like one JSON array, not JSON lines" if data[:1] == b"[" else ""
        raise RecordError("broken", f"not JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        raise RecordError("broken", f"a JSON {_json_name(value)}, not an object")
    return value


def member_text(record: dict[str, object], *, key: str, escaped: bool) -> str:
    """Return the text under a key.

    Args:
        record: A parsed JSON line.
        key: The member that holds the text.
        escaped: True if the line held Unicode escapes; only they can bring in half a pair.

    Raises:
        RecordError: The key is missing, holds no string, or one that is no Unicode text.
    """
    if key not in record:
        others = ", ".join(list(record)[:5])
        raise RecordError("no-key", f"no key {key!r} (it has: {others or 'none'})")
    text = record[key]
    if not isinstance(text, str):
        raise RecordError("not-text", f"{key!r} holds {_json_name(text)}, not text{_hint(text)}")
    if escaped:
        _check_pairs(text)
    return text


def member_sentences(record: dict[str, object], *, key: str, escaped: bool) -> list[str]:
    """Return the sentences under a key that holds a list of them.

    Raises:
        RecordError: One of them is no text.
    """
    value = record[key]
    sentences = value if isinstance(value, list) else [value]
    return [member_text({key: each}, key=key, escaped=escaped) for each in sentences]


def _check_pairs(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            "surrogate", f"half a surrogate pair (U+{ord(text[error.start]):04X}), which is no text"
        ) from None


def plain_text(data: bytes) -> str:
    """Return a text file's document, its line ends made LF.

    Raises:
        RecordError: It is no UTF-8.
    """
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RecordError(
            "broken", f"not UTF-8 at byte {error.start + 1} of the document"
        ) from None


def notes(text: str) -> Sequence[tuple[ProblemKind, str]]:
    """Return what is odd about a text that is kept nevertheless."""
    found: list[tuple[ProblemKind, str]] = []
    if "\0" in text:
        found.append(("nul", f"{text.count(chr(0))} NUL characters, kept as text"))
    if len(text) > HUGE:
        found.append(("huge", f"{len(text):,} characters in one document"))
    return found


def _hint(value: object) -> str:
    is_sentences = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return " (a list of sentences is read by --split-sentences)" if is_sentences else ""


def _json_name(value: object) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
