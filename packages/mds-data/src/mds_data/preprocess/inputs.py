"""Find the input files and read raw records from them: JSON lines, text, or rows of tables.

A line ends at LF and nowhere else (a CR before it is dropped with it), so that line numbers are
those of `wc` and editors, whatever other break characters a text holds.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import zstandard

from mds_data.errors import DataError
from mds_data.preprocess.tables import dataset_files, table_rows
from mds_data.provenance.source_facts import SIDECAR_END

__all__ = [
    "LONGEST_RECORD",
    "InputError",
    "InputFile",
    "InputFormat",
    "InputReader",
    "Record",
    "TextUnit",
    "find_inputs",
]

InputFormat = Literal["jsonl", "text", "parquet", "arrow"]
TextUnit = Literal["document", "paragraph", "line"]

LONGEST_RECORD = 512 * 2**20
"""Bytes; a longer line (or text file, read whole) is refused before it fills the memory."""
_USUAL_LINE = 2**20
_MARK = b"\xef\xbb\xbf"
"""What some editors put first in a file."""
_COMPRESSIONS = {".gz": "gz", ".bz2": "bz2", ".xz": "xz", ".lzma": "xz", ".zst": "zst"}
_DAMAGE = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""What decompressors raise when a file is not what its suffix says."""
_FORMATS: dict[str, InputFormat] = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
}


class InputError(DataError):
    """An input can't be used; the message names file, line, reason and remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file to read, and how."""

    path: Path
    format: InputFormat
    compression: str | None
    size: int
    """Bytes on disk."""


@dataclass(frozen=True, slots=True)
class Record:
    """The bytes of one JSON line or one text, and the line where it begins.

    A row of a table is a JSON line whose number is the row's.
    """

    line: int
    data: bytes
    """A bytearray, in truth, if it is long: it grew without a second copy."""


def find_inputs(
    patterns: Sequence[str | Path], *, format: InputFormat | None = None
) -> list[InputFile]:
    """Return the files that paths and globs name, in the order given; a glob's files by name.

    Args:
        patterns: Paths, or globs such as ``data/*.jsonl.gz``.
        format: How to read all of them; by each file's suffix when left out.

    Raises:
        FileNotFoundError: A path or a glob names no file.
        InputError: A folder was named, or one file twice.
    """
    paths = [path for pattern in patterns for path in _matches(str(pattern))]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is named twice; its documents would stand in the store twice.")
    return [_describe(path, format=format) for path in paths]


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern)
    if path.is_dir():
        files = dataset_files(path)
        if files is not None:
            return files
        raise InputError(
            f"{path} is a folder; name its files by a pattern, such as '{path}/*.jsonl'."
        )
    if path.is_file():
        return [path]
    if path.exists():
        raise InputError(f"{path} is a device or a pipe; write what it gives to a file first.")
    found = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 (pathlib has no absolute patterns)
    files = [each for each in found if each.is_file() and not each.name.endswith(SIDECAR_END)]
    if not files:
        what = "no file matches this pattern" if glob.has_magic(pattern) else "no such input file"
        raise FileNotFoundError(f"{pattern}: {what}; check the path.")
    return files


def _describe(path: Path, *, format: InputFormat | None) -> InputFile:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    inner = suffixes[:-1] if compression else suffixes
    by_suffix = _FORMATS.get(inner[-1], "jsonl") if inner else "jsonl"
    return InputFile(
        path=path,
        format=format or by_suffix,
        compression=compression,
        size=path.stat().st_size,
    )


class _CountedFile(io.RawIOBase):
    """The file on disk; counts and hashes the bytes as they pass."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self.digest = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self.digest.update(memoryview(buffer)[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class InputReader:
    """Reads the records of one file; knows how far it is, and at the end the file's digest.

    Args:
        file: The file.
        text_unit: What one document of a text file is.
        members: Columns of a table that are wanted; all if None. Other files are read whole.
    """

    def __init__(
        self,
        file: InputFile,
        *,
        text_unit: TextUnit = "document",
        members: Sequence[str] | None = None,
    ) -> None:
        self.file = file
        self._text_unit = text_unit
        self._members = members
        self._counted = _CountedFile(file.path)
        self._share: float | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the file on disk that were read so far."""
        if self._share is not None:
            return int(self._share * self._counted.count)
        return self._counted.count

    @property
    def sha256(self) -> str:
        """Digest of the bytes read so far; of the file once all records were read."""
        return self._counted.digest.hexdigest()

    def records(self) -> Iterator[Record]:
        """Yield the records in order.

        Raises:
            InputError: The file is damaged, or holds a record too long to read.
        """
        with closing(self._counted):
            if self.file.format in {"parquet", "arrow"}:
                yield from self._rows()
                return
            stream = _decompressed(self._counted, self.file)
            try:
                yield from self._cut(stream)
                while self._counted.read(2**20):
                    pass  # Bytes after the end of a compressed stream belong to the file's digest.
            except _DAMAGE as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise  # The disk's error, not the decompressor's.
                raise InputError(
                    f"{self.file.path} is damaged or cut: {error}. Copy the file again."
                ) from error

    def _rows(self) -> Iterator[Record]:
        """Yield the rows of a table, which is read out of order; its digest is taken before."""
        if self.file.compression is not None:
            raise InputError(
                f"{self.file.path}: a compressed {self.file.format} file can't be read; it "
                f"compresses by itself, so decompress it first."
            )
        self._share = 0.0
        while self._counted.read(2**20):
            pass
        rows = table_rows(
            self.file.path,
            format="parquet" if self.file.format == "parquet" else "arrow",
            members=self._members,
        )
        for number, (share, line) in enumerate(rows, start=1):
            self._share = share
            yield Record(number, line)
        self._share = 1.0

    def _cut(self, stream: IO[bytes]) -> Iterator[Record]:
        lines = _numbered_lines(stream, self.file.path)
        if self.file.format == "jsonl" or self._text_unit == "line":
            return lines
        if self._text_unit == "paragraph":
            return _paragraphs(lines)
        return _whole(stream, self.file.path)


def _decompressed(raw: _CountedFile, file: InputFile) -> IO[bytes]:
    buffered = io.BufferedReader(raw, buffer_size=2**18)
    if file.compression == "gz":
        # The module's own reader hands out small pieces; a second buffer makes its lines cheap.
        return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=buffered)), 2**18)
    if file.compression == "bz2":
        return bz2.BZ2File(buffered)
    if file.compression == "xz":
        return lzma.LZMAFile(buffered)
    if file.compression == "zst":
        reader = zstandard.ZstdDecompressor().stream_reader(buffered, read_across_frames=True)
        return io.BufferedReader(reader, 2**18)
    return buffered


def _numbered_lines(stream: IO[bytes], path: Path) -> Iterator[Record]:
    number = 0
    usual = min(_USUAL_LINE, LONGEST_RECORD)
    while line := stream.readline(usual):
        number += 1
        if len(line) == usual and not line.endswith(b"\n"):
            yield Record(number, cast("bytes", _long_line(line, stream, path, number=number)))
            continue
        if number == 1:
            line = line.removeprefix(_MARK)
        yield Record(number, line.removesuffix(b"\n").removesuffix(b"\r"))


def _long_line(start: bytes, stream: IO[bytes], path: Path, *, number: int) -> bytearray:
    """Return the whole of a line that begins with ``start``; it is in memory once."""
    line = bytearray(start)
    while not line.endswith(b"\n") and (more := stream.readline(_USUAL_LINE)):
        line += more
        if len(line) > LONGEST_RECORD:
            raise InputError(
                f"{path}, line {number}: the line is longer than {LONGEST_RECORD} bytes. "
                f"Is this JSON lines?"
            )
    if number == 1 and line.startswith(_MARK):
        del line[: len(_MARK)]
    if line.endswith(b"\n"):
        del line[-1:]
    if line.endswith(b"\r"):
        del line[-1:]
    return line


def _paragraphs(lines: Iterator[Record]) -> Iterator[Record]:
    """Join lines up to the next blank one."""
    block: list[bytes] = []
    first = 1
    for record in lines:
        if record.data.strip():
            first = first if block else record.line
            block.append(record.data)
        elif block:
            yield Record(first, b"\n".join(block))
            block = []
    if block:
        yield Record(first, b"\n".join(block))


def _whole(stream: IO[bytes], path: Path) -> Iterator[Record]:
    data = bytearray()
    while block := stream.read(_USUAL_LINE):
        data += block
        if len(data) > LONGEST_RECORD:
            raise InputError(
                f"{path} is longer than {LONGEST_RECORD} bytes, too much for one document; "
                f"cut it by --text-unit paragraph or --text-unit line."
            )
    if data.startswith(_MARK):
        del data[: len(_MARK)]
    whole = [data]
    del data
    yield Record(1, cast("bytes", whole.pop()))  # Not held here while someone works on it.
