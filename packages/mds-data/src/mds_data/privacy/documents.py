"""Redact document after document, and count: documents changed, and values replaced by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from mds_data.privacy.findings import ALL_KINDS, Kind
from mds_data.privacy.replacement import ROUNDS
from mds_data.privacy.rules import RedactionRules
from mds_data.privacy.stream import redact_stream

__all__ = ["DocumentRedactor", "RedactionTally"]


@dataclass(slots=True)
class RedactionTally:
    """What was replaced, in numbers alone."""

    changed: int = 0
    """Documents in which something was replaced."""
    replaced: Counter[Kind] = field(default_factory=Counter)

    def add(self, other: RedactionTally) -> None:
        """Count what another part of the input had."""
        self.changed += other.changed
        self.replaced.update(other.replaced)

    def as_json(self) -> dict[str, Any]:
        """The numbers, for a manifest."""
        found = {kind: self.replaced[kind] for kind in ALL_KINDS if self.replaced[kind]}
        return {"documents_changed": self.changed, "replaced": found}

    @classmethod
    def from_json(cls, members: Mapping[str, Any]) -> Self:
        """The tally that `as_json` was asked of."""
        return cls(members["documents_changed"], Counter(members["replaced"]))

    def sentence(self) -> str:
        """The numbers, for a person."""
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.replaced.most_common())
        return f"redacted {self.changed:,} documents: {kinds or 'nothing was found'}"


class DocumentRedactor:
    """Redacts the texts of documents; keeps no value.

    Args:
        rules: What to replace, and how.

    Attributes:
        tally: What was replaced since it was last taken.
    """

    def __init__(self, rules: RedactionRules) -> None:
        self._redactor = rules.redactor()
        self._quiet = rules.redactor()
        self.tally = RedactionTally()

    def texts(self, texts: Sequence[str]) -> list[str]:
        """The texts of one document, redacted."""
        self._redactor.counts = Counter()  # a document before this one may have broken off
        redacted = [self._redactor(text) for text in texts]
        self._count()
        return redacted

    def value(self, value: Any) -> Any:
        """One document that is a JSON value, all strings in it redacted."""
        self._redactor.counts = Counter()
        redacted = self._within(value)
        self._count()
        return redacted

    def _within(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._redactor(value)
        if isinstance(value, list):
            return [self._within(each) for each in value]
        if isinstance(value, dict):
            return {key: self._within(each) for key, each in value.items()}
        return value

    def pieces(self, pieces: Iterable[str]) -> Iterator[str]:
        """Yield one document that comes in pieces: joined, what `texts` makes of the whole."""
        self._redactor.counts = Counter()
        for _ in range(ROUNDS):
            pieces = redact_stream(pieces, self._redactor)
        yield from pieces
        self._count()

    def unseen(self, text: str) -> str:
        """A text about a document, such as a message or a label, redacted and not counted."""
        return self._quiet(text)

    def take_tally(self) -> RedactionTally:
        """What was replaced since the last call."""
        taken, self.tally = self.tally, RedactionTally()
        return taken

    def _count(self) -> None:
        found, self._redactor.counts = self._redactor.counts, Counter()
        self.tally.add(RedactionTally(1 if found else 0, found))
