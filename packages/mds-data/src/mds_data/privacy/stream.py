"""Redact text that arrives in pieces, as if it had come whole.

A finding may lie across the border of two pieces, and what is one depends on some characters before
it. So the newest part of the text is held back until enough has followed, and some text that was
already given out is kept as context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mds_data.privacy.findings import Finding
from mds_data.privacy.replacement import Redactor

__all__ = ["redact_stream"]

HELD_BACK = 32 * 2**10
"""Characters: more than the longest finding, a private key of up to 16 K."""
CONTEXT = 256
"""Characters before a finding that its detector may look at."""


def redact_stream(pieces: Iterable[str], redactor: Redactor) -> Iterator[str]:
    """Yield the redacted text of all pieces; some 64 K characters are in memory at a time.

    Args:
        pieces: Consecutive parts of one text, cut anywhere.
        redactor: Replaces, and counts.

    Yields:
        Redacted text. Joined, it is what one pass over the joined pieces gives.
    """
    text, given = "", 0  # text[:given] was given out already and is kept as context
    for piece in pieces:
        text += piece
        if len(text) - given < 2 * HELD_BACK:
            continue
        found = redactor.find(text)
        until = _outside(found, len(text) - HELD_BACK)
        yield _part(text, found, redactor, start=given, end=until)
        kept = max(0, until - CONTEXT)
        text, given = text[kept:], until - kept
    yield _part(text, redactor.find(text), redactor, start=given, end=len(text))


def _outside(found: Iterable[Finding], position: int) -> int:
    """``position``, or the start of the finding that it lies in."""
    inside = (finding.start for finding in found if finding.start < position < finding.end)
    return min(inside, default=position)


def _part(text: str, found: Iterable[Finding], redactor: Redactor, *, start: int, end: int) -> str:
    """``text[start:end]`` with the findings in it replaced."""
    inside = [
        Finding(finding.start - start, finding.end - start, finding.kind)
        for finding in found
        if start <= finding.start and finding.end <= end
    ]
    return redactor.replace(text[start:end], inside)
