"""What was left out of a store of parts, counted by kind, with the first places of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["BROKEN", "Drop", "DropKind", "DropLog"]

DropKind = Literal["broken", "empty", "short", "long", "ratio", "no-answer"]

BROKEN: DropKind = "broken"
"""Stops the work, or is skipped by ``--on-error skip``; the others are only counted."""
_EXAMPLES = 20
_MEANING: dict[DropKind, str] = {
    "broken": "that can't be read",
    "empty": "with an empty side",
    "short": "too short",
    "long": "too long",
    "ratio": "of unlike lengths",
    "no-answer": "without an answer to learn",
}


@dataclass(frozen=True, slots=True)
class Drop:
    """One document that was left out, and why."""

    file: str
    line: int
    kind: DropKind
    detail: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.detail}"


class DropLog:
    """Counts drops by kind and keeps the first few of each kind with their places."""

    def __init__(self) -> None:
        self.counts: Counter[DropKind] = Counter()
        self.examples: dict[DropKind, list[Drop]] = {}

    def add(self, drops: Iterable[Drop]) -> None:
        """Count drops."""
        for drop in drops:
            self.counts[drop.kind] += 1
            kept = self.examples.setdefault(drop.kind, [])
            if len(kept) < _EXAMPLES:
                kept.append(drop)

    def sentences(self) -> list[str]:
        """One sentence a kind: how many, why, and where the first of them stand."""
        return [self._sentence(kind) for kind in _MEANING if self.counts[kind]]

    def _sentence(self, kind: DropKind) -> str:
        places: dict[str, list[str]] = {}
        for drop in self.examples[kind]:
            places.setdefault(drop.file, []).append(str(drop.line))
        where = "; ".join(f"{file} line {', '.join(lines)}" for file, lines in places.items())
        more = ", ..." if self.counts[kind] > len(self.examples[kind]) else ""
        return f"dropped {self.counts[kind]:,} {_MEANING[kind]}: {where}{more}"

    def as_json(self) -> dict[str, object]:
        """Counts and first places, for the manifest."""
        return {
            kind: {
                "count": self.counts[kind],
                "first": [{"file": d.file, "line": d.line, "detail": d.detail} for d in examples],
            }
            for kind, examples in sorted(self.examples.items())
        }
