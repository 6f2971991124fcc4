"""Redact the strings of JSON records: the members that were named, or all of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mds_data.preprocess.batches import Batch
from mds_data.preprocess.records import Problem, RecordError, json_object, plain_text
from mds_data.privacy.findings import Kind
from mds_data.privacy.rules import RedactionRules

__all__ = ["RecordRedactor", "Redacted", "RedactionSettings"]

_AROUND = 48
_MOST_SAMPLES = 40


@dataclass(frozen=True, kw_only=True)
class RedactionSettings(RedactionRules):
    """What to replace, how, and in which members. Can be sent to worker processes."""

    json_keys: tuple[str, ...] = ("text",)
    all_fields: bool = False
    drop_keys: tuple[str, ...] = ()
    samples: bool = False


@dataclass(frozen=True, slots=True)
class Redacted:
    """What became of a batch."""

    lines: list[bytes]
    problems: list[Problem]
    counts: Counter[Kind]
    touched: int
    """Records in which something was replaced."""
    samples: list[tuple[Kind, str, str]]
    """Kind, and the redacted text before and after some replacements."""


class RecordRedactor:
    """Redacts batches of records; one in each worker.

    Args:
        settings: What to do.
    """

    def __init__(self, settings: RedactionSettings) -> None:
        self._settings = settings
        self._redactor = settings.redactor()
        self._messages = settings.redactor()
        self._samples: list[tuple[Kind, str, str]] = []

    def __call__(self, batch: Batch) -> Redacted:
        """Redact; a record that can't be read becomes a problem, and no line."""
        self._redactor.counts = Counter()
        self._samples = []
        lines: list[bytes] = []
        problems: list[Problem] = []
        touched = 0
        for number, data in _filled(batch):
            before = self._redactor.counts.total()
            try:
                lines.append(self._line(data, is_text=batch.format == "text"))
            except RecordError as error:
                detail = self._messages(str(error))
                problems.append(Problem(batch.file, number, error.kind, detail))
            touched += self._redactor.counts.total() > before
        return Redacted(lines, problems, self._redactor.counts, touched, self._samples)

    def _line(self, data: bytes, *, is_text: bool) -> bytes:
        if is_text:
            record: dict[str, Any] = {"text": self._text(plain_text(data))}
        else:
            record = dict(json_object(data))
            for key in self._settings.drop_keys:
                record.pop(key, None)
            for key in list(record) if self._settings.all_fields else self._settings.json_keys:
                if key in record:
                    record[key] = self._value(record[key])
        return json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"

    def _value(self, value: Any) -> Any:
        """Any JSON value, the strings in it redacted, names of members too."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, list):
            return [self._value(each) for each in value]
        if isinstance(value, dict):
            return {self._text(key): self._value(each) for key, each in value.items()}
        return self._number(value)

    def _number(self, value: Any) -> Any:
        """A card's or telephone's number may be written as a JSON number."""
        if isinstance(value, int) and not isinstance(value, bool):
            text = self._redactor(str(value))
            return value if text == str(value) else text
        return value

    def _text(self, text: str) -> str:
        if self._settings.samples and len(self._samples) < _MOST_SAMPLES:
            self._take_samples(text)
        return self._redactor(text)

    def _take_samples(self, text: str) -> None:
        shown = self._settings.redactor()
        for finding in shown.find(text):
            before = shown(text[: finding.start])[-_AROUND:]
            self._samples.append((finding.kind, before, shown(text[finding.end :])[:_AROUND]))


def _filled(batch: Batch) -> Iterator[tuple[int, bytes]]:
    """Line and content of the records that are not blank."""
    for record in batch.records:
        if record.data.strip():
            yield record.line, record.data
