"""Remove copies: texts that are the same, or nearly so, as one that came before.

Three passes, none of which holds the corpus: signatures to disk, groups of candidates compared
and joined, and the input once more without the copies. What grows with the number of documents
lies in files beside the output, about 1 KB a document; memory does not.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mds_data.curation.minhash import BandPlan, band_keys, plan_bands, shingles, signature
from mds_data.curation.records import CuratedBatch, Removal, text_records
from mds_data.curation.report import CurationReport
from mds_data.curation.run import (
    CurationConfig,
    check_errors,
    curated_source,
    new_output,
    removed_line,
)
from mds_data.curation.spill import KeySpill, RowFile, Union
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.inputs import InputFile, Record
from mds_data.preprocess.records import RecordError

__all__ = ["DedupSettings", "dedup"]

_LEADERS = 16
"""Unlike texts of one group that others are compared to."""
_COMPARED = 2048
_DIGEST = 4
"""Numbers of 32 bits in the digest of an exact copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupSettings:
    """What counts as a copy."""

    mode: Literal["near", "exact"] = "near"
    """near: alike by at least ``threshold``; exact: the same but for white space at line ends."""
    threshold: float = 0.8
    """Jaccard index of the sets of word sequences, estimated."""
    shingle_words: int = 5
    """Words of a sequence."""
    permutations: int = 128
    """Places of a signature; the estimate errs by about 1 / sqrt(permutations)."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ValueError(f"the threshold ({self.threshold}) must lie above 0 and up to 1.")
        if self.shingle_words < 1 or not 16 <= self.permutations <= 1024:
            raise ValueError("there must be at least 1 word and 16 to 1024 permutations.")


@dataclass(frozen=True, slots=True)
class _Signatures:
    """What the first pass keeps of a batch."""

    lines: NDArray[np.uint64]
    """[documents] line of each."""
    rows: NDArray[np.uint32]
    """[documents, places]."""
    keys: NDArray[np.uint64]
    """[documents, bands]."""
    removals: list[Removal]


class _Signer:
    """First pass: the signature of each text."""

    def __init__(self, settings: DedupSettings, keys: tuple[str, ...]) -> None:
        self._settings = settings
        self._keys = keys
        self._plan = _plan(settings)

    def __call__(self, batch: Batch) -> _Signatures:
        removals: list[Removal] = []

        def refuse(record: Record, error: RecordError) -> None:
            removals.append(Removal(batch.file, record.line, error.kind, str(error), record.data))

        lines, rows = [], []
        for record in text_records(batch, self._keys, refuse=refuse):
            lines.append(record.line)
            rows.append(self._row(record.text))
        keys = [self._row_keys(row) for row in rows]
        return _Signatures(
            np.asarray(lines, np.uint64),
            np.asarray(rows, np.uint32).reshape(len(rows), -1),
            np.asarray(keys, np.uint64).reshape(len(rows), -1),
            removals,
        )

    def _row(self, text: str) -> NDArray[np.uint32]:
        settings = self._settings
        if settings.mode == "near":
            found = shingles(text, size=settings.shingle_words)
            return signature(found, count=settings.permutations)
        plain = "\n".join(line.rstrip() for line in text.strip().split("\n"))
        data = plain.encode("utf-8", "surrogatepass")
        return np.frombuffer(hashlib.blake2b(data, digest_size=4 * _DIGEST).digest(), "<u4")

    def _row_keys(self, row: NDArray[np.uint32]) -> NDArray[np.uint64]:
        return band_keys(row, self._plan)


class _Passer:
    """Third pass: the lines of the same records, in the same order."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys

    def __call__(self, batch: Batch) -> list[tuple[bytes, int]]:
        return [
            (record.data, len(record.text))
            for record in text_records(batch, self._keys, refuse=lambda *_: None)
        ]


def _plan(settings: DedupSettings) -> BandPlan:
    if settings.mode == "exact":
        return BandPlan(1, _DIGEST)
    return plan_bands(settings.permutations, threshold=settings.threshold)


def dedup(
    config: CurationConfig,
    settings: DedupSettings,
    *,
    engine: Engine | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Write each text once: the first of all that are alike.

    Args:
        config: What to read and where to write.
        settings: What counts as a copy.
        engine: Where signatures are computed.
        on_progress: Called with bytes done, bytes in all (the input twice) and records.
    """
    engine = engine or LocalEngine(workers=config.workers)
    report = CurationReport(command="dedup", arguments=asdict(settings))
    with ExitStack() as stack:
        output = stack.enter_context(new_output(config.output, overwrite=config.overwrite))
        removed = config.removed and stack.enter_context(
            new_output(config.removed, overwrite=config.overwrite)
        )
        folder = stack.enter_context(_work_folder(config.output))
        index = stack.enter_context(
            _Index(folder, files=curated_source(config).files, settings=settings)
        )
        index.sign(config, engine=engine, report=report, on_progress=on_progress)
        index.join(settings)
        for batch in index.chosen(config, engine=engine, on_progress=on_progress):
            output.writelines(line + b"\n" for line in batch.lines)
            if removed:
                removed.writelines(map(removed_line, batch.removals))
            report.add(batch)
    return report


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{output.name}.work-", dir=output.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_PLACE = np.dtype([("file", "<u4"), ("line", "<u8")])


class _Index:
    """Signatures, keys and places of all documents, on the disk."""

    def __init__(
        self, folder: Path, *, files: tuple[InputFile, ...], settings: DedupSettings
    ) -> None:
        places = settings.permutations if settings.mode == "near" else _DIGEST
        self._folder = folder
        self._files = [file.path.as_posix() for file in files]
        self._stack = ExitStack()
        self._rows = RowFile(folder / "signatures", np.dtype(("<u4", places)))
        self._places = RowFile(folder / "places", _PLACE)
        self._spill = KeySpill(folder / "keys")

    def __enter__(self) -> _Index:
        self._stack.enter_context(self._rows)
        self._stack.enter_context(self._places)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def sign(
        self,
        config: CurationConfig,
        *,
        engine: Engine,
        report: CurationReport,
        on_progress: Callable[[int, int, int], None] | None,
    ) -> None:
        """First pass: write signatures, keys and places."""
        source = curated_source(config)
        settings = DedupSettings(**report.arguments)
        for mark, found in engine.run(source, make=partial(_Signer, settings, config.keys)):
            check_errors(found.removals, config=config)
            report.remove(found.removals)
            numbers = self._rows.count + np.arange(len(found.lines), dtype=np.uint64)
            self._spill.add(found.keys.ravel(), np.repeat(numbers, found.keys.shape[1]))
            self._rows.add(found.rows)
            places = np.empty(len(found.lines), _PLACE)
            places["file"], places["line"] = mark.file, found.lines
            self._places.add(places)
            if on_progress is not None:
                on_progress(source.bytes_at(mark), 2 * source.bytes_total, self._rows.count)
        report.inputs = tuple(source.done)
        self._rows.finish()
        self._places.finish()

    def join(self, settings: DedupSettings) -> None:
        """Second pass: compare the documents of each group and join those that are alike."""
        self._sets = Union(self._folder / "sets", self._rows.count)
        threshold = settings.threshold if settings.mode == "near" else 1.0
        for group in self._spill.groups():
            for start in range(1, len(group), _COMPARED):
                self._join(np.concatenate([group[:1], group[start : start + _COMPARED]]), threshold)

    def _join(self, group: NDArray[np.uint64], threshold: float) -> None:
        rows = self._rows.rows(group)
        left = np.arange(len(group))
        for _ in range(_LEADERS):
            if len(left) < 2:
                return
            alike = (rows[left] == rows[left[0]]).mean(axis=1) >= threshold
            for other in left[alike][1:].tolist():
                self._sets.join(int(group[left[0]]), int(group[other]))
            left = left[~alike]

    def chosen(
        self,
        config: CurationConfig,
        *,
        engine: Engine,
        on_progress: Callable[[int, int, int], None] | None,
    ) -> Iterator[CuratedBatch]:
        """Third pass: yield what is kept, and what is a copy of what."""
        source = curated_source(config)
        number = 0
        for mark, records in engine.run(source, make=partial(_Passer, config.keys)):
            batch = CuratedBatch(records=len(records))
            for data, characters in records:
                root = self._sets.root(number)
                batch.characters_in += characters
                if root == number:
                    batch.lines.append(data)
                    batch.characters_out += characters
                else:
                    batch.removals.append(self._removal(number, root, data))
                number += 1
            yield batch
            if on_progress is not None:
                done = source.bytes_total + source.bytes_at(mark)
                on_progress(done, 2 * source.bytes_total, number)

    def _removal(self, number: int, root: int, data: bytes) -> Removal:
        places = self._places.rows(np.array([number, root], np.uint64))
        (file, line), (first_file, first_line) = (
            (self._files[int(place["file"])], int(place["line"])) for place in places
        )
        same, other = self._rows.rows(np.array([number, root], np.uint64))
        share = float((same == other).mean())
        reason = "copy" if share == 1 else "near copy"
        return Removal(file, line, reason, f"{share:.0%} like {first_file} line {first_line}", data)
