"""The input as batches of raw records, each with a mark from which a later run can go on.

Batches depend on the files alone, so any engine with any number of workers sees the same ones.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_data.preprocess.batches import Batch
from mds_data.preprocess.inputs import (
    InputError,
    InputFile,
    InputReader,
    Record,
    TextUnit,
)
from mds_data.preprocess.long_record import LONG_RECORD
from mds_data.preprocess.report import InputRecord

__all__ = ["FileBatches", "Mark", "Source", "check_unchanged"]

_BATCH_BYTES = 2**19
_BATCH_RECORDS = 4096


@dataclass(frozen=True, order=True, slots=True)
class Mark:
    """How far the input was read when a batch was complete. Later marks are greater."""

    file: int
    """Number of the file."""
    batch: int
    """Batches of this file up to here."""
    size: int
    """Bytes of the file that were read for them."""
    sha256: str
    """Digest of those bytes."""


class FileBatches:
    """Iterates over one file's batches with their marks; `record` is there at the end."""

    def __init__(
        self,
        file: InputFile,
        *,
        number: int,
        text_unit: TextUnit,
        members: Sequence[str] | None = None,
    ) -> None:
        self._file = file
        self._members = members
        self._number = number
        self._text_unit = text_unit
        self.record: InputRecord | None = None
        """The file's digest, once all of it was read."""

    def __iter__(self) -> Iterator[tuple[Mark, Batch]]:
        reader = InputReader(self._file, text_unit=self._text_unit, members=self._members)
        name = self._file.path.as_posix()
        for number, records in enumerate(_grouped(reader.records()), start=1):
            mark = Mark(self._number, number, reader.bytes_read, reader.sha256)
            yield mark, Batch(name, self._file.format, records)
        self.record = InputRecord(path=name, size=reader.bytes_read, sha256=reader.sha256)


def _grouped(records: Iterator[Record]) -> Iterator[list[Record]]:
    waiting: list[Record] = []
    size = 0
    for record in records:
        if len(record.data) >= LONG_RECORD and waiting:
            yield waiting  # A huge record goes alone.
            waiting, size = [], 0
        waiting.append(record)
        size += len(record.data)
        del record  # Whoever works on a huge one lets it go before the next one is read.
        if size >= _BATCH_BYTES or len(waiting) >= _BATCH_RECORDS:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


class Source:
    """Iterates over the batches of all files, from a mark on.

    Args:
        files: What to read.
        text_unit: What one document of a text file is.
        members: Columns of tables that are wanted; all if None.
        start: The mark of the last batch that needs no reading any more.
        done: Records of the files before it.

    Attributes:
        marks: The marks of the batches that were handed out and not yet taken from here.
        done: Records of the files that were read to the end.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        *,
        text_unit: TextUnit = "document",
        members: Sequence[str] | None = None,
        start: Mark | None = None,
        done: Sequence[InputRecord] = (),
    ) -> None:
        self.files = tuple(files)
        self.text_unit: TextUnit = text_unit
        self.members = members
        self.start = start
        self.marks: deque[Mark] = deque()
        self.done = list(done)
        self._before = [sum(file.size for file in files[:number]) for number in range(len(files))]
        self.bytes_total = sum(file.size for file in files)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self.done), len(self.files)):
            batches = FileBatches(
                self.files[number],
                number=number,
                text_unit=self.text_unit,
                members=self.members,
            )
            mark = None
            for mark, batch in batches:
                if self.is_behind(mark):
                    continue
                self.marks.append(mark)
                yield batch
            self.check_reached(number, mark)
            if batches.record is not None:
                self.done.append(batches.record)

    def check_reached(self, number: int, last: Mark | None) -> None:
        """Raise InputError if a file ended before the batch from which to go on."""
        start = self.start
        if start is not None and start.file == number and (last is None or last < start):
            raise _changed(self.files[number].path)

    def is_behind(self, mark: Mark) -> bool:
        """Whether an earlier run has done this batch.

        Raises:
            InputError: It is the last of them, and the file is not what it was then.
        """
        start = self.start
        if start is None or (mark.file, mark.batch) > (start.file, start.batch):
            return False
        if (mark.file, mark.batch) == (start.file, start.batch) and mark != start:
            raise _changed(self.files[mark.file].path)
        return True

    def bytes_at(self, mark: Mark) -> int:
        """Bytes on disk that were read for the batches up to a mark."""
        return self._before[mark.file] + mark.size


def check_unchanged(file: InputFile, kept: Mapping[str, Any]) -> InputRecord:
    """Return the record of a file that an earlier run has read to its end.

    The file is read again only if its date is another one.

    Raises:
        InputError: Its content differs.
    """
    record = InputRecord(path=str(kept["path"]), size=int(kept["size"]), sha256=str(kept["sha256"]))
    status = file.path.stat()
    if status.st_size != record.size or file.path.as_posix() != record.path:
        raise _changed(file.path)
    if status.st_mtime_ns != kept["modified"] and _digest(file.path) != record.sha256:
        raise _changed(file.path)
    return record


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _changed(path: Path) -> InputError:
    return InputError(
        f"{path} was changed since the interrupted run read it, so that run can't go on; "
        f"start anew by --overwrite."
    )
