"""What a detector reports: where a text holds private data, and of which kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

__all__ = ["KINDS", "Finding", "Kind", "lower", "without_overlaps"]

Kind: TypeAlias = Literal[
    "SECRET",
    "EMAIL",
    "IBAN",
    "CARD",
    "CRYPTO",
    "IP",
    "NATIONAL_ID",
    "PASSPORT",
    "PHONE",
    "NAME",
]

KINDS: tuple[Kind, ...] = get_args(Kind)
"""All kinds; of findings that overlap, the one whose kind comes first stays."""

_RANK = {kind: rank for rank, kind in enumerate(KINDS)}


class Finding(NamedTuple):
    """Private data in a text: ``text[start:end]``."""

    start: int
    end: int
    kind: Kind


def without_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """By position; of overlapping ones the kind that comes first in KINDS, then the longer."""
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda f: (_RANK[f.kind], f.start - f.end, f.start)):
        if all(finding.end <= other.start or other.end <= finding.start for other in kept):
            kept.append(finding)
    return sorted(kept)


def lower(text: str) -> str:
    """In lower case, position by position: a few letters have longer small forms and stay."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(small if len(small := letter.lower()) == 1 else letter for letter in text)
