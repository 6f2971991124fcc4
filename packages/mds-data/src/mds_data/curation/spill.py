"""Keys on disk: find documents that share one, in memory that does not grow with their number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeySpill", "RowFile", "Union"]

_ENTRY = np.dtype([("key", "<u8"), ("document", "<u8")])
_PARTS = 64
_WAITING = 4096
"""Entries of a part that wait in memory."""
_MOST = 2**21
"""Entries that are sorted in memory at once; 32 MB."""


class KeySpill:
    """Takes keys of documents, and gives the groups of documents that share a key."""

    def __init__(self, folder: Path, *, most: int = _MOST) -> None:
        folder.mkdir()
        self._folder = folder
        self._most = most
        self._waiting: list[list[NDArray[Any]]] = [[] for _ in range(_PARTS)]
        self._counts = [0] * _PARTS

    def add(self, keys: NDArray[np.uint64], documents: NDArray[np.uint64]) -> None:
        """Take keys, [n], and the document of each, [n]; documents come in order."""
        entries = np.empty(len(keys), _ENTRY)
        entries["key"], entries["document"] = keys, documents
        parts = (keys >> np.uint64(58)).astype(np.int64)
        order = np.argsort(parts, kind="stable")
        bounds = np.searchsorted(parts[order], np.arange(_PARTS + 1))
        for part in range(_PARTS):
            chosen = entries[order[bounds[part] : bounds[part + 1]]]
            if len(chosen):
                self._waiting[part].append(chosen)
                self._counts[part] += len(chosen)
                if self._counts[part] >= _WAITING:
                    self._flush(part)

    def _flush(self, part: int) -> None:
        if self._waiting[part]:
            with (self._folder / str(part)).open("ab") as file:
                file.write(np.concatenate(self._waiting[part]).tobytes())
            self._waiting[part], self._counts[part] = [], 0

    def groups(self) -> Iterator[NDArray[np.uint64]]:
        """Yield the documents of each key that has several, in order; files go as they are read."""
        for part in range(_PARTS):
            self._flush(part)
            path = self._folder / str(part)
            if path.exists():
                yield from self._groups(path, shift=52)
                path.unlink()
        self._folder.rmdir()

    def _groups(self, path: Path, *, shift: int) -> Iterator[NDArray[np.uint64]]:
        count = path.stat().st_size // _ENTRY.itemsize
        if count <= self._most or shift < 0:
            # Not to be cut further: it is one key, that of a text which stands there a million
            # times. All its documents are compared to its first, so blocks do.
            yield from self._blocks(path)
            return
        inner = [path.with_name(f"{path.name}-{piece}") for piece in range(_PARTS)]
        for block in _read(path, self._most):
            pieces = (block["key"] >> np.uint64(shift)) & np.uint64(_PARTS - 1)
            for piece in np.unique(pieces).tolist():
                with inner[piece].open("ab") as file:
                    file.write(block[pieces == piece].tobytes())
        for each in inner:
            if each.exists():
                yield from self._groups(each, shift=shift - 6 if shift >= 6 else -1)
                each.unlink()

    def _blocks(self, path: Path) -> Iterator[NDArray[np.uint64]]:
        first: dict[int, int] = {}
        several = path.stat().st_size > self._most * _ENTRY.itemsize
        for block in _read(path, self._most):
            order = np.argsort(block["key"], kind="stable")
            keys, documents = block["key"][order], block["document"][order]
            borders = np.concatenate([[0], np.flatnonzero(np.diff(keys)) + 1, [len(keys)]])
            sizes = np.diff(borders)
            for number in np.flatnonzero(sizes > (0 if several else 1)).tolist():
                members = documents[borders[number] : borders[number + 1]]
                if several:
                    known = first.setdefault(int(keys[borders[number]]), int(members[0]))
                    members = np.concatenate([[np.uint64(known)], members])
                members = np.unique(members)  # one document may have a key in several bands
                if len(members) > 1:
                    yield members


def _read(path: Path, most: int) -> Iterator[NDArray[Any]]:
    with path.open("rb") as file:
        while data := file.read(most * _ENTRY.itemsize):
            yield np.frombuffer(data, _ENTRY)


class RowFile:
    """Rows of equal length, written in order and read by number."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._file = path.open("wb", buffering=2**18)
        self.count = 0

    def add(self, rows: NDArray[Any]) -> None:
        """Write rows."""
        self._file.write(np.ascontiguousarray(rows, self._dtype.base).tobytes())
        self.count += len(rows)

    def finish(self) -> None:
        """Let nothing follow; rows can be read from now on."""
        self._file.close()
        self._read = self._path.open("rb")

    def rows(self, numbers: NDArray[np.uint64]) -> NDArray[Any]:
        """Read rows by their numbers, [n, ...]."""
        size = self._dtype.itemsize
        result = bytearray()
        for number in numbers.tolist():
            self._read.seek(number * size)
            result += self._read.read(size)
        return np.frombuffer(bytes(result), self._dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if hasattr(self, "_read"):
            self._read.close()


class Union:
    """Sets of documents that belong together; the least number of a set stands for it."""

    def __init__(self, path: Path, count: int) -> None:
        # Eight bytes a document, which the system may move to the disk.
        self._parent = np.memmap(path, np.int64, "w+", shape=(max(count, 1),))
        for start in range(0, count, 2**20):
            stop = min(start + 2**20, count)
            self._parent[start:stop] = np.arange(start, stop)

    def root(self, document: int) -> int:
        """Return the document that stands for this one's set."""
        parent = self._parent
        while (above := int(parent[document])) != document:
            parent[document] = parent[above]
            document = above
        return document

    def join(self, one: int, other: int) -> None:
        """Make the sets of two documents one."""
        one, other = self.root(one), self.root(other)
        self._parent[max(one, other)] = min(one, other)
