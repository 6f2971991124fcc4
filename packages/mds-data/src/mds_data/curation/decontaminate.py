"""Remove texts that hold the test questions on which a model will be judged.

A text is contaminated if it shares a sequence of words (13, as for GPT-3) with a reference. Words
are compared in lower case and without signs. A reference that is shorter counts as a whole.
Sequences that many texts hold are the language's or a licence's, and no leak: they can be ignored,
as GPT-3 did with those of more than ten texts, at the price of reading the input twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mds_data.curation.records import CuratedBatch, TextRecord, curate, text_records
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, curated_source, run_filter
from mds_data.curation.words import hash_sequences, word_hashes, word_spans, words_of
from mds_data.errors import DataError
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.inputs import InputFormat, TextUnit, find_inputs
from mds_data.preprocess.texts import InputTexts

__all__ = ["DecontaminateSettings", "decontaminate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecontaminateSettings:
    """What a leak is and what is done about it."""

    references: tuple[str, ...]
    """Files of test questions: paths and globs."""
    reference_keys: tuple[str, ...] = ("text",)
    reference_format: InputFormat | None = None
    reference_unit: TextUnit = "line"
    """What one reference of a text file is."""
    words: int = 13
    min_words: int = 8
    """Shorter references are passed over: any text might hold them."""
    action: Literal["drop", "cut"] = "drop"
    """Drop the whole text, or cut the place out and keep the pieces around it."""
    margin: int = 200
    """Of cut: characters that go with it on either side."""
    min_piece: int = 200
    """Of cut: shorter pieces are dropped."""
    max_pieces: int = 10
    """Of cut: a text that falls into more pieces is dropped."""
    max_texts: int | None = None
    """Ignore sequences that more texts hold than this; none is ignored if None."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_words <= self.words:
            raise ValueError(
                f"min_words ({self.min_words}) must lie from 1 to words ({self.words})."
            )
        if self.max_texts is not None and self.max_texts < 1:
            raise ValueError(f"max_texts ({self.max_texts}) must be at least 1.")


Rows: TypeAlias = dict[int, NDArray[np.int64]]
"""Rows of the references' tables, by the length of their sequences."""


class _References:
    """Hashes of the references' word sequences, by their length."""

    def __init__(self, settings: DecontaminateSettings) -> None:
        found: dict[int, list[NDArray[np.uint64]]] = {}
        owners: dict[int, list[NDArray[np.uint32]]] = {}
        self.files: list[str] = []
        self.passed_over = self.count = 0
        for file, text in _reference_texts(settings, self.files):
            words = words_of(text)
            length = min(len(words), settings.words)
            self.count += 1
            if length < settings.min_words:
                self.passed_over += 1
                continue
            hashes = hash_sequences(word_hashes(words), length)
            found.setdefault(length, []).append(hashes)
            owners.setdefault(length, []).append(np.full(len(hashes), file, np.uint32))
        self.tables = {
            length: _sorted(np.concatenate(parts), np.concatenate(owners[length]))
            for length, parts in sorted(found.items())
        }
        if not self.tables:
            raise DataError(
                f"{', '.join(settings.references)}: no reference has {settings.min_words} words; "
                f"give others, or lower --min-words."
            )

    def matches(self, words: Sequence[str]) -> Iterator[tuple[int, int, int]]:
        """Yield first word, number of words and file of each sequence that a reference has."""
        for length, places, rows in self._found(words):
            owners = self.tables[length][1]
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                yield place, length, int(owners[row])

    def rows(self, words: Sequence[str]) -> Rows:
        """Return, by length, the rows of the tables that hold a sequence of these words."""
        return {length: np.unique(rows) for length, _, rows in self._found(words)}

    def without(self, rows: Rows) -> None:
        """Forget rows of the tables."""
        self.tables = {
            length: (np.delete(known, rows[length]), np.delete(owners, rows[length]))
            if length in rows
            else (known, owners)
            for length, (known, owners) in self.tables.items()
        }

    def _found(
        self, words: Sequence[str]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield a length, the first words of its sequences that are known, and their rows."""
        hashes = word_hashes(words)
        for length, (known, _) in self.tables.items():
            if not len(known):
                continue
            sequences = hash_sequences(hashes, length)
            at = np.minimum(np.searchsorted(known, sequences), len(known) - 1)
            places = np.flatnonzero(known[at] == sequences)
            yield length, places, at[places]


def _sorted(
    hashes: NDArray[np.uint64], owners: NDArray[np.uint32]
) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    known, first = np.unique(hashes, return_index=True)
    return known, owners[first]


def _reference_texts(
    settings: DecontaminateSettings, files: list[str]
) -> Iterator[tuple[int, str]]:
    """Yield the number of its file, and each text; ``files`` takes their names."""
    for file in find_inputs(settings.references, format=settings.reference_format):
        files.append(file.path.as_posix())
        for text in InputTexts(
            [file.path],
            keys=settings.reference_keys,
            format=settings.reference_format,
            text_unit=settings.reference_unit,
        ):
            yield len(files) - 1, text


class _Counter:
    """First pass, if common sequences are ignored: what each text of a batch holds."""

    def __init__(self, settings: DecontaminateSettings, keys: tuple[str, ...]) -> None:
        self._keys = keys
        self._references = _References(settings)

    def __call__(self, batch: Batch) -> list[Rows]:
        return [
            self._references.rows([word for word, _, _ in word_spans(record.text)])
            for record in text_records(batch, self._keys, refuse=lambda *_: None)
        ]


def _common(
    config: CurationConfig,
    settings: DecontaminateSettings,
    references: _References,
    *,
    most: int,
    engine: Engine,
    on_progress: Callable[[int, int, int], None] | None,
) -> Rows:
    """Return the rows of sequences that more than ``most`` texts hold."""
    counts = {
        length: np.zeros(len(known), np.int64) for length, (known, _) in references.tables.items()
    }
    source, texts = curated_source(config), 0
    make = partial(_Counter, settings, config.keys)
    for mark, found in engine.run(source, make=make):
        for rows in found:
            for length, held in rows.items():
                counts[length][held] += 1
        texts += len(found)
        if on_progress is not None:
            on_progress(source.bytes_at(mark), source.bytes_total, texts)
    return {length: np.flatnonzero(each > most) for length, each in counts.items()}


class _Decontaminator:
    """Looks for leaks in batches; lives in a worker."""

    def __init__(
        self, settings: DecontaminateSettings, keys: tuple[str, ...], common: Rows
    ) -> None:
        self._settings = settings
        self._keys = keys
        self.references = _References(settings)
        self.references.without(common)

    def __call__(self, batch: Batch) -> CuratedBatch:
        return curate(batch, self._keys, judge=self._judge)

    def _judge(self, record: TextRecord, result: CuratedBatch) -> tuple[str, str] | list[bytes]:
        spans = list(word_spans(record.text))
        words = [word for word, _, _ in spans]
        found = sorted(self.references.matches(words))
        if not found:
            result.characters_out += len(record.text)
            return [record.data]
        files = sorted({self.references.files[file] for _, _, file in found})
        for file in files:
            result.note(f"texts that hold part of {file}")
        first, length, _ = found[0]
        shown = " ".join(words[first : first + length])
        detail = f"{len(found)} sequences of {', '.join(files)}: {shown!r}"
        if self._settings.action == "drop":
            return "contaminated", detail
        leaks = [(spans[first][1], spans[first + length - 1][2]) for first, length, _ in found]
        pieces = self._pieces(record.text, leaks)
        if not 1 <= len(pieces) <= self._settings.max_pieces:
            why = "nothing of use is left" if not pieces else f"it fell into {len(pieces)} pieces"
            return "contaminated", f"{detail}; {why}"
        result.note("texts cut")
        result.characters_out += sum(map(len, pieces))
        return [record.with_texts({self._keys[0]: piece}) for piece in pieces]

    def _pieces(self, text: str, leaks: Sequence[tuple[int, int]]) -> list[str]:
        """Return what is left of a text without leaks and the characters around them."""
        settings = self._settings
        pieces, start = [], 0
        for first, last in leaks:
            pieces.append(text[start : max(start, first - settings.margin)])
            start = max(start, last + settings.margin)
        pieces.append(text[start:])
        return [cut for piece in pieces if len(cut := piece.strip()) >= settings.min_piece]


def decontaminate(
    config: CurationConfig,
    settings: DecontaminateSettings,
    *,
    engine: Engine | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Write the texts that hold nothing of the references.

    Args:
        config: What to read and where to write.
        settings: What a leak is and what is done about it.
        engine: Where the work is done.
        on_progress: Called with bytes done, bytes in all and records.

    Raises:
        DataError: No reference is long enough.
    """
    if settings.action == "cut" and len(config.keys) > 1:
        raise ValueError("cutting works on one key; give one by --json-keys, or drop whole texts.")
    if settings.max_texts is not None and config.task is not None:
        raise ValueError("a task sees a part of the texts only, so it can't tell what is common.")
    references = _References(settings)
    engine = engine or LocalEngine(workers=config.workers)
    common: Rows = {}
    if settings.max_texts is not None:
        common = _common(
            config,
            settings,
            references,
            most=settings.max_texts,
            engine=engine,
            on_progress=on_progress,
        )
    report = run_filter(
        config,
        command="decontaminate",
        arguments=asdict(settings),
        make=partial(_Decontaminator, settings, config.keys, common),
        engine=engine,
        on_progress=on_progress,
    )
    report.notes["references"] = references.count
    if settings.max_texts is not None:
        report.notes["sequences ignored as common"] = sum(map(len, common.values()))
    if references.passed_over:
        report.notes["references too short to look for"] = references.passed_over
    return report
