"""Records of text on their way through a filter: what comes out, and what was left out and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mds_data.preprocess.batches import Batch
from mds_data.preprocess.inputs import Record
from mds_data.preprocess.records import RecordError, json_object, member_text, plain_text

__all__ = ["CuratedBatch", "Removal", "TextRecord", "curate", "text_records"]


@dataclass(frozen=True, slots=True)
class TextRecord:
    """One record that holds text."""

    line: int
    data: bytes
    """Its line of JSON."""
    members: dict[str, Any]
    text: str
    """What its keys hold, joined by blank lines."""

    def with_texts(self, texts: dict[str, str]) -> bytes:
        """Return its line with other texts; the same bytes if none differs."""
        if all(self.members[key] == text for key, text in texts.items()):
            return self.data
        return json_line(self.members | texts)


@dataclass(frozen=True, slots=True)
class Removal:
    """A record that was left out."""

    file: str
    line: int
    reason: str
    """One of few words, by which removals are counted."""
    detail: str
    data: bytes = field(default=b"", repr=False)


@dataclass(slots=True)
class CuratedBatch:
    """What a filter made of a batch."""

    lines: list[bytes] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    records: int = 0
    characters_in: int = 0
    characters_out: int = 0
    notes: dict[str, int] = field(default_factory=dict)
    """How often something else happened that the report should tell."""

    def note(self, what: str, count: int = 1) -> None:
        """Count something."""
        self.notes[what] = self.notes.get(what, 0) + count


def text_records(
    batch: Batch, keys: Sequence[str], *, refuse: Callable[[Record, RecordError], None]
) -> Iterator[TextRecord]:
    """Yield the records of a batch that hold text; give the others to ``refuse``."""
    for record in batch.records:
        if not record.data.strip():
            continue
        try:
            if batch.format == "text":
                members: dict[str, Any] = {keys[0]: plain_text(record.data)}
                texts, data = [members[keys[0]]], json_line(members)
            else:
                members, data = json_object(record.data), record.data
                escaped = b"\\u" in data
                texts = [member_text(members, key=key, escaped=escaped) for key in keys]
        except RecordError as error:
            refuse(record, error)
            continue
        yield TextRecord(record.line, data, members, "\n\n".join(texts))


def curate(
    batch: Batch,
    keys: Sequence[str],
    *,
    judge: Callable[[TextRecord, CuratedBatch], tuple[str, str] | list[bytes]],
) -> CuratedBatch:
    """Apply a filter to a batch.

    Args:
        batch: The records.
        keys: Members that hold text.
        judge: Gives the lines that a record becomes, or reason and detail of its removal.
    """
    result = CuratedBatch()

    def refuse(record: Record, error: RecordError) -> None:
        result.removals.append(
            Removal(batch.file, record.line, error.kind, str(error), record.data)
        )

    for record in text_records(batch, keys, refuse=refuse):
        result.records += 1
        result.characters_in += len(record.text)
        verdict = judge(record, result)
        if isinstance(verdict, tuple):
            result.removals.append(Removal(batch.file, record.line, *verdict, record.data))
        else:
            result.lines.extend(verdict)
    return result


def json_line(members: dict[str, Any]) -> bytes:
    """Return members as a line of JSON."""
    return json.dumps(members, ensure_ascii=False).encode("utf-8", "surrogatepass")
