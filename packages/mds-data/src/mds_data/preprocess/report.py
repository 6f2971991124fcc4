"""What a preprocessing run read, kept and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mds_data.preprocess.records import ERROR_KINDS, Problem, ProblemKind
from mds_data.privacy.documents import RedactionTally

__all__ = ["InputRecord", "PreprocessReport", "ProblemLog"]

_EXAMPLES = 20

_MEANING: dict[ProblemKind, tuple[str, str]] = {
    "broken": ("skipped", "not JSON or not UTF-8"),
    "no-key": ("skipped", "without the key"),
    "not-text": ("skipped", "where the key holds no text"),
    "surrogate": ("skipped", "with half a surrogate pair"),
    "column": ("skipped", "without a fit value for a column"),
    "refused": ("skipped", "that the tokenizer refused"),
    "empty": ("skipped", "empty"),
    "nul": ("kept", "with NUL characters"),
    "huge": ("kept", "huge"),
}


class ProblemLog:
    """Counts problems by kind and keeps the first few of each kind with their places."""

    def __init__(self) -> None:
        self.counts: Counter[ProblemKind] = Counter()
        self.examples: dict[ProblemKind, list[Problem]] = {}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Self:
        """Return the log that `as_json` was asked of."""
        log = cls()
        for kind in _MEANING:
            if kind in members:
                log.counts[kind] = members[kind]["count"]
                log.examples[kind] = [
                    Problem(each["file"], each["line"], kind, each["detail"])
                    for each in members[kind]["first"]
                ]
        return log

    def join(self, other: ProblemLog) -> None:
        """Take over the problems of a later part of the input."""
        for kind, count in other.counts.items():
            self.counts[kind] += count
            kept = self.examples.setdefault(kind, [])
            kept.extend(other.examples[kind][: _EXAMPLES - len(kept)])

    def add(self, problems: Iterable[Problem]) -> None:
        """Count problems."""
        for problem in problems:
            self.counts[problem.kind] += 1
            kept = self.examples.setdefault(problem.kind, [])
            if len(kept) < _EXAMPLES:
                kept.append(problem)

    @property
    def num_errors(self) -> int:
        """Problems that a run without ``--on-error skip`` would have stopped at."""
        return sum(self.counts[kind] for kind in ERROR_KINDS)

    def sentences(self) -> list[str]:
        """One sentence a kind: how many, what, and where the first of them stand."""
        return [self._sentence(kind) for kind in _MEANING if self.counts[kind]]

    def _sentence(self, kind: ProblemKind) -> str:
        verb, what = _MEANING[kind]
        places: dict[str, list[str]] = {}
        for problem in self.examples[kind]:
            places.setdefault(problem.file, []).append(str(problem.line))
        where = "; ".join(f"{file} line {', '.join(lines)}" for file, lines in places.items())
        more = ", ..." if self.counts[kind] > len(self.examples[kind]) else ""
        return f"{verb} {self.counts[kind]:,} {what}: {where}{more}"

    def as_json(self) -> dict[str, object]:
        """Counts and first places, for the manifest."""
        return {
            kind: {
                "count": self.counts[kind],
                "first": [{"file": p.file, "line": p.line, "detail": p.detail} for p in examples],
            }
            for kind, examples in sorted(self.examples.items())
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InputRecord:
    """One file that was read."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessReport:
    """The result of one run."""

    outputs: dict[str, Path]
    """Store of each key."""
    documents: dict[str, int]
    """Documents kept, by key."""
    tokens: dict[str, int]
    """Tokens written, by key."""
    inputs: tuple[InputRecord, ...]
    problems: ProblemLog = field(default_factory=ProblemLog)
    redacted: RedactionTally | None = None
    """What was replaced in the texts; None if nothing was looked for."""
