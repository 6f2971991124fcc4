"""What a detector reports: where a text holds private data, and of which kind."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

__all__ = [
    "ALL_KINDS",
    "KINDS",
    "Finding",
    "Kind",
    "is_word",
    "lower",
    "present",
    "without_overlaps",
]

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

ALL_KINDS: tuple[Kind, ...] = get_args(Kind)
"""Of findings that overlap, the one whose kind comes first stays."""
KINDS: tuple[Kind, ...] = tuple(kind for kind in ALL_KINDS if kind != "NAME")
"""What rules find. Names take a model."""

_RANK = {kind: rank for rank, kind in enumerate(ALL_KINDS)}


class Finding(NamedTuple):
    """Private data in a text: ``text[start:end]``."""

    start: int
    end: int
    kind: Kind


def without_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """By position; of overlapping ones the kind that comes first in ALL_KINDS, then the longer."""
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda f: (_RANK[f.kind], f.start - f.end, f.start)):
        place = bisect(kept, finding)
        before, after = kept[max(0, place - 1) : place], kept[place : place + 1]
        if all(other.end <= finding.start for other in before) and all(
            finding.end <= other.start for other in after
        ):
            kept.insert(place, finding)
    return kept


def is_word(character: str) -> bool:
    """A letter or digit of a script that puts spaces between words.

    Chinese, Japanese and Korean text goes on right beside a number: it is no part of it.
    """
    return character.isalnum() and (character.isascii() or character < "\u2e80")


def lower(text: str) -> str:
    """In lower case, position by position: a few letters have longer small forms and stay."""
    lowered = text.lower()
    if len(lowered) == len(text):
        return lowered
    return "".join(small if len(small := letter.lower()) == 1 else letter for letter in text)


def present(text: str, words: Iterable[str], *, within: str) -> list[str]:
    """Those of the words that stand in a text.

    Args:
        text: In lower case.
        words: Likewise.
        within: Stands in many of the words, so that one search speaks for all of these.
    """
    is_ascii, has_within = text.isascii(), within in text
    return [
        word
        for word in words
        if (has_within or within not in word) and (not is_ascii or word.isascii()) and word in text
    ]
