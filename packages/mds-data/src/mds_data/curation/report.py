"""What a filter kept and what it removed and why, as data for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mds_data.curation.records import CuratedBatch, Removal
from mds_data.preprocess.records import ERROR_KINDS
from mds_data.preprocess.report import InputRecord
from mds_data.store.schema import package_version

__all__ = ["CurationReport"]

_EXAMPLES = 20


@dataclass(kw_only=True)
class CurationReport:
    """The result of one run of clean, dedup or decontaminate."""

    command: str
    arguments: Mapping[str, Any]
    records: int = 0
    """Records that held text."""
    kept: int = 0
    """Lines that were written."""
    characters_in: int = 0
    characters_out: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    """Records removed, by reason."""
    examples: dict[str, list[Removal]] = field(default_factory=dict)
    """The first removals of each reason."""
    notes: Counter[str] = field(default_factory=Counter)
    inputs: Sequence[InputRecord] = ()

    def add(self, batch: CuratedBatch) -> None:
        """Count what became of a batch."""
        self.records += batch.records
        self.kept += len(batch.lines)
        self.characters_in += batch.characters_in
        self.characters_out += batch.characters_out
        self.notes.update(batch.notes)
        self.remove(batch.removals)

    def remove(self, removals: Iterable[Removal]) -> None:
        """Count removals."""
        for removal in removals:
            self.removed[removal.reason] += 1
            examples = self.examples.setdefault(removal.reason, [])
            if len(examples) < _EXAMPLES:
                examples.append(removal)

    def take_removed(self, members: Mapping[str, Any]) -> None:
        """Count the removals of another part of the input, as `as_json` tells them."""
        for reason, found in members.items():
            examples = self.examples.setdefault(reason, [])
            for each in found["first"][: _EXAMPLES - len(examples)]:
                examples.append(Removal(each["file"], each["line"], reason, each["detail"]))
            self.removed[reason] += found["count"]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        return {
            "command": self.command,
            "version": package_version(),
            "arguments": dict(self.arguments),
            "inputs": [asdict(record) for record in self.inputs],
            "records": self.records,
            "kept": self.kept,
            "characters_in": self.characters_in,
            "characters_out": self.characters_out,
            "notes": dict(sorted(self.notes.items())),
            "removed": {
                reason: {
                    "count": count,
                    "first": [
                        {"file": each.file, "line": each.line, "detail": each.detail}
                        for each in self.examples[reason]
                    ],
                }
                for reason, count in self.removed.most_common()
            },
        }

    def as_transform(self) -> dict[str, Any]:
        """What a record of the output's origin keeps: settings and counts, no examples."""
        return {
            "name": self.command,
            "version": package_version(),
            "arguments": dict(self.arguments),
            "report": {
                "records": self.records,
                "kept": self.kept,
                "removed": dict(sorted(self.removed.items())),
                "notes": dict(sorted(self.notes.items())),
            },
        }

    def sentences(self) -> Iterator[str]:
        """One sentence a reason, and what else happened."""
        for reason, count in self.removed.most_common():
            first = self.examples[reason][0]
            word = "skipped" if reason in ERROR_KINDS else "removed"
            yield (
                f"{word} {count:,} for {reason}: first {first.file} line {first.line}, "
                f"{first.detail}"
            )
        for note, count in sorted(self.notes.items()):
            yield f"{note}: {count:,}"
