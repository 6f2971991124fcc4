"""Read aligned pairs of texts: two files line by line, or one TSV or JSON-lines file.

A line ends at LF and nowhere else, so a pair can't shift by a character that only looks like an
end of line. Two files of unlike length are refused before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

from mds_data.preprocess.inputs import InputError, InputFile, InputReader, Record, find_inputs
from mds_data.preprocess.records import RecordError, json_object
from mds_data.preprocess.report import InputRecord

__all__ = [
    "PairFormat",
    "PairSource",
    "RawPair",
    "source_of_files",
    "source_of_two_files",
    "split_line",
    "text_of",
]

PairFormat = Literal["tsv", "jsonl"]

_TSV_SUFFIXES = frozenset({".tsv", ".tab"})


@dataclass(frozen=True, slots=True)
class RawPair:
    """The bytes of one pair, and where it stands."""

    file: str
    line: int
    source: bytes
    target: bytes | None
    """None if ``source`` is a whole line that holds both."""


class PairSource:
    """Iterates over the raw pairs of all inputs, and knows how much of them was read."""

    def __init__(self, groups: Sequence[tuple[InputFile, ...]]) -> None:
        self._groups = groups
        self._open: tuple[InputReader, ...] = ()
        self.done: list[InputRecord] = []
        self.bytes_total = sum(file.size for group in groups for file in group)

    @property
    def names(self) -> str:
        """The files, for a message."""
        return ", ".join(file.path.as_posix() for group in self._groups for file in group)

    @property
    def bytes_read(self) -> int:
        """Bytes of the files on disk that were read so far."""
        return sum(record.size for record in self.done) + sum(r.bytes_read for r in self._open)

    def __iter__(self) -> Iterator[RawPair]:
        for group in self._groups:
            self._open = tuple(InputReader(file, text_unit="line") for file in group)
            yield from _raw_pairs(self._open)
            for reader in self._open:
                self.done.append(
                    InputRecord(
                        path=reader.file.path.as_posix(),
                        size=reader.bytes_read,
                        sha256=reader.sha256,
                    )
                )
            self._open = ()


def _raw_pairs(readers: tuple[InputReader, ...]) -> Iterator[RawPair]:
    first = readers[0].file.path.as_posix()
    if len(readers) == 1:
        for record in readers[0].records():
            yield RawPair(first, record.line, record.data, None)
        return
    for source, target in zip(*(reader.records() for reader in readers), strict=True):
        yield RawPair(first, source.line, source.data, target.data)


def source_of_two_files(source: Path, target: Path) -> PairSource:
    """Pairs of line ``n`` of one file with line ``n`` of the other.

    Raises:
        FileNotFoundError: One of them is not there.
        InputError: They have unlike numbers of lines; the message names the first line that has no
            partner.
    """
    files = tuple(find_inputs([path], format="text")[0] for path in (source, target))
    if source.resolve() == target.resolve():
        raise InputError(f"{source} is named as source and as target; name two files.")
    _check_aligned(files[0], files[1])
    return PairSource([files])


def _check_aligned(source: InputFile, target: InputFile) -> None:
    """Count the lines of both in one pass, before a byte is written."""
    counts = [0, 0]
    readers = [InputReader(file, text_unit="line").records() for file in (source, target)]
    missing: Record | None = None
    for pair in zip_longest(*readers):
        for side, record in enumerate(pair):
            counts[side] += record is not None
            if record is None and missing is None:
                missing = pair[1 - side]
    if missing is None:
        return
    longer = source if counts[0] > counts[1] else target
    raise InputError(
        f"{source.path} has {counts[0]:,} lines and {target.path} has {counts[1]:,}: line "
        f"{missing.line:,} of {longer.path} has no partner. Line n of one file must be the "
        f"translation of line n of the other; nothing was written."
    )


def source_of_files(
    patterns: Sequence[str], *, format: PairFormat | None = None
) -> tuple[PairSource, PairFormat]:
    """Pairs of files that hold both sides: ``source TAB target``, or JSON objects.

    Args:
        patterns: Paths and globs.
        format: How to read all files; by the first one's suffix when left out.

    Raises:
        FileNotFoundError: A path or a glob names no file.
        InputError: The suffix says neither.
    """
    files = find_inputs(patterns, format="text")
    formats = {format or _format_of(file.path) for file in files}
    if len(formats) > 1:
        raise InputError(f"{', '.join(patterns)}: mix TSV and JSON lines; do one after the other.")
    return PairSource([(file,) for file in files]), formats.pop()


def _format_of(path: Path) -> PairFormat:
    suffixes = {suffix.lower() for suffix in path.suffixes}
    if suffixes & _TSV_SUFFIXES:
        return "tsv"
    if suffixes & {".jsonl", ".json", ".ndjson"}:
        return "jsonl"
    raise InputError(
        f"{path} holds one language or an unknown format: name two files by --source and --target, "
        f"or say --input-format tsv or jsonl."
    )


def split_line(data: bytes, *, format: PairFormat, keys: tuple[str, str]) -> tuple[str, str]:
    """The two texts of a line that holds both.

    Raises:
        RecordError: The line does not hold two texts.
    """
    if format == "jsonl":
        members = json_object(data)
        return _member(members, keys[0]), _member(members, keys[1])
    fields = data.split(b"\t")
    if len(fields) != 2:
        raise RecordError("broken", f"{len(fields)} columns; a pair is SOURCE, a tab, TARGET")
    return text_of(fields[0]), text_of(fields[1])


def _member(members: dict[str, object], key: str) -> str:
    """The text under a key, or under a path of keys such as ``translation.en``."""
    value: object = members
    parts = [key] if key in members else key.split(".")
    for part in parts:
        if not isinstance(value, dict) or part not in value:
            others = ", ".join(list(members)[:5])
            raise RecordError("no-key", f"no key {key!r} (it has: {others or 'none'})")
        value = value[part]
    if not isinstance(value, str):
        raise RecordError("not-text", f"{key!r} holds no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RecordError("surrogate", "half a surrogate pair, which is no text") from None
    return value


def text_of(data: bytes) -> str:
    """One side's text.

    Raises:
        RecordError: It is no UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("broken", f"not UTF-8 at byte {error.start + 1} of the line") from None
