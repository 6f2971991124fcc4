"""The one place from which commands write to stdout, and how text is made fit for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable

__all__ = ["bar", "printable", "write"]

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def write(lines: Iterable[str]) -> None:
    """Write lines to stdout; what its encoding lacks is written as an escape."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def bar(share: float, *, width: int) -> str:
    """Return a bar of ``share`` times ``width`` characters, filled up with spaces."""
    if not _can_write(_EIGHTHS):
        return ("#" * round(share * width)).ljust(width)
    eighths = round(share * width * 8)
    whole, rest = divmod(max(eighths, 1 if share > 0 else 0), 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def printable(text: str) -> str:
    """Return text without control characters, which could steer the terminal."""
    mark = " ⏎ " if _can_write("⏎") else " \\n "
    return "".join(
        character if character.isprintable() else mark if character == "\n" else _escaped(character)
        for character in text
    )


def _escaped(character: str) -> str:
    return " " if character.isspace() else character.encode("unicode_escape").decode()


def _can_write(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
