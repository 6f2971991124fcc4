"""Remove copies: texts that are the same, or nearly so, as one that came before.

Three passes, none of which holds the corpus: signatures to disk, groups of candidates compared
and joined, and the input once more without the copies. What grows with the number of documents
lies in files beside the output, about 1 KB a document; memory does not.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.curation.records import CuratedBatch, Removal, text_records
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, curated_source, new_output, removed_line
from mds_data.curation.signatures import (
    PLACE,
    DedupSettings,
    SignedPart,
    open_parts,
    places_of,
    row_dtype,
    sign_batches,
)
from mds_data.curation.spill import KeySpill, RowFile, Union
from mds_data.errors import DataError
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.inputs import InputFile
from mds_data.preprocess.report import InputRecord

__all__ = ["DedupSettings", "dedup"]

_LEADERS = 16
"""Unlike texts of one group that others are compared to."""
_COMPARED = 2048


class _Passer:
    """Third pass: the lines of the same records, in the same order."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = keys

    def __call__(self, batch: Batch) -> list[tuple[bytes, int]]:
        return [
            (record.data, len(record.text))
            for record in text_records(batch, self._keys, refuse=lambda *_: None)
        ]


def dedup(
    config: CurationConfig,
    settings: DedupSettings,
    *,
    signatures: Sequence[Path] = (),
    engine: Engine | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Write each text once: the first of all that are alike.

    Args:
        config: What to read and where to write.
        settings: What counts as a copy.
        signatures: What the tasks of a job array have signed, instead of the first pass.
        engine: Where signatures are computed.
        on_progress: Called with bytes done, bytes in all (the input twice) and records.
    """
    engine = engine or LocalEngine(workers=config.workers)
    report = CurationReport(command="dedup", arguments=asdict(settings))
    parts = open_parts(signatures, config=config, settings=settings) if signatures else []
    with ExitStack() as stack:
        output = stack.enter_context(new_output(config.output, overwrite=config.overwrite))
        removed = config.removed and stack.enter_context(
            new_output(config.removed, overwrite=config.overwrite)
        )
        folder = stack.enter_context(_work_folder(config.output))
        index = stack.enter_context(
            _Index(folder, files=curated_source(config).files, settings=settings)
        )
        if parts:
            index.take(parts, report=report)
        else:
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


class _Index:
    """Signatures, keys and places of all documents, on the disk."""

    def __init__(
        self, folder: Path, *, files: tuple[InputFile, ...], settings: DedupSettings
    ) -> None:
        self._folder = folder
        self._files = [file.path.as_posix() for file in files]
        self._stack = ExitStack()
        self._rows = RowFile(folder / "signatures", row_dtype(settings))
        self._places = RowFile(folder / "places", PLACE)
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
        settings = DedupSettings(**report.arguments)

        def show(done: int, total: int, count: int) -> None:
            if on_progress is not None:
                on_progress(done, 2 * total, count)

        for file, found in sign_batches(
            config, settings, engine=engine, report=report, on_progress=show
        ):
            self._add(found.rows, places_of(file, found.lines), found.keys)
        self._finish(report.inputs)

    def take(self, parts: Sequence[SignedPart], *, report: CurationReport) -> None:
        """First pass, done by the tasks of a job array."""
        inputs: list[InputRecord] = []
        for part in parts:
            for rows, places, keys in part.blocks():
                moved = places.copy()
                moved["file"] += len(inputs)
                self._add(rows, moved, keys)
            inputs += part.inputs
            report.take_removed(part.description["removed"])
        report.inputs = tuple(inputs)
        self._finish(inputs)

    def _add(
        self, rows: NDArray[np.uint32], places: NDArray[Any], keys: NDArray[np.uint64]
    ) -> None:
        numbers = self._rows.count + np.arange(len(rows), dtype=np.uint64)
        self._spill.add(keys.ravel(), np.repeat(numbers, keys.shape[1]))
        self._rows.add(rows)
        self._places.add(places)

    def _finish(self, inputs: Sequence[InputRecord]) -> None:
        self._inputs = inputs
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
            if number + len(records) > self._rows.count:
                raise _changed(self._files[mark.file])
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
        for signed, read in zip(self._inputs, source.done, strict=True):
            if signed != read:
                raise _changed(read.path)

    def _removal(self, number: int, root: int, data: bytes) -> Removal:
        places = self._places.rows(np.array([number, root], np.uint64))
        (file, line), (first_file, first_line) = (
            (self._files[int(place["file"])], int(place["line"])) for place in places
        )
        same, other = self._rows.rows(np.array([number, root], np.uint64))
        share = float((same == other).mean())
        reason = "copy" if share == 1 else "near copy"
        return Removal(file, line, reason, f"{share:.0%} like {first_file} line {first_line}", data)


def _changed(path: str) -> DataError:
    return DataError(f"{path}: was changed since its texts were compared; begin anew.")
