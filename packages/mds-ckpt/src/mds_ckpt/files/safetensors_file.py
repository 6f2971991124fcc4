"""Safetensors files: tensors read where they are asked for; a writer that streams and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.file_digest import FileDigest
from mds_ckpt.files.file_operations import REAL, FileOperations
from mds_ckpt.files.regular_file import OpenFile, RegularFile
from mds_ckpt.files.safetensors_header import (
    Header,
    TensorEntry,
    TensorSpec,
    header_bytes,
    read_header,
)
from mds_ckpt.files.writeback import Writeback
from mds_ckpt.tensors.checksum import as_hex, crc32c
from mds_ckpt.tensors.dtype import dtype_name, numpy_dtype

__all__ = [
    "Header",
    "SafetensorsFile",
    "SafetensorsWriter",
    "StoredTensor",
    "TensorEntry",
    "TensorSpec",
    "WrittenFile",
]

if TYPE_CHECKING:
    import numpy as np

_CHUNK = 4 << 20


class SafetensorsFile:
    """A safetensors file; its header is read and checked at the first question.

    Args:
        path: The file.
        cache_links: Follow links of a Hugging Face cache.
        file: The file, where it is none that lies at ``path`` as it is.
    """

    def __init__(
        self, path: Path, *, cache_links: bool = False, file: RegularFile | None = None
    ) -> None:
        self.path = path
        self.file = file or RegularFile(path, cache_links=cache_links)
        self._header: Header | None = None

    @property
    def header(self) -> Header:
        """The checked header."""
        if self._header is None:
            with self.file.open() as file:
                self._header = read_header(file)
        return self._header

    def entry(self, name: str) -> TensorEntry:
        """The tensor ``name``; RejectedError if the file does not hold it."""
        try:
            return self.header.entries[name]
        except KeyError:
            raise RejectedError(
                self.path,
                "the file does not hold it",
                remedy="use an older checkpoint or a copy",
                tensor=name,
            ) from None


class StoredTensor:
    """The elements of one tensor of a safetensors file; a source for ``checkpoint.StoredPiece``.

    Args:
        file: The file.
        key: The tensor's name in it.
        dtype: The number type that it must have.
        shape: The shape that it must have.
        checksum: crc32c of its bytes in hex, compared at the first touch; None if none is known.
    """

    def __init__(
        self,
        file: SafetensorsFile,
        key: str,
        *,
        dtype: str,
        shape: Sequence[int],
        checksum: str | None = None,
    ) -> None:
        self._file = file
        self._key = key
        self._dtype = dtype
        self._shape = tuple(shape)
        self._checksum = checksum

    def read(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Elements ``[start, stop)`` in row-major order, as a 1-D array."""
        import numpy as np

        entry = self.entry()
        result = np.empty(stop - start, numpy_dtype(self._dtype))
        data = result.view(np.uint8)
        with self._file.file.open() as file:
            whole = data.size == entry.stop - entry.start
            if not whole:
                self._check_stream(file, entry)
            file.read_into(data.data, entry.start + start * result.itemsize)
        if whole and (expected := self._checksum) is not None:
            self._compare(crc32c(data), expected)
        return result

    def entry(self) -> TensorEntry:
        """Where the file has it; RejectedError if it is not what was promised."""
        entry = self._file.entry(self._key)
        if (entry.dtype, entry.shape) != (self._dtype, self._shape):
            raise self._rejected(
                f"the file holds {entry.dtype} {list(entry.shape)} where {self._dtype} "
                f"{list(self._shape)} was promised"
            )
        return entry

    def check(self) -> None:
        """Read all bytes once and compare their checksum, if one is known."""
        with self._file.file.open() as file:
            self._check_stream(file, self.entry())

    def _check_stream(self, file: OpenFile, entry: TensorEntry) -> None:
        import numpy as np

        # Another thread may check the same tensor and forget its checksum meanwhile.
        if (expected := self._checksum) is None:
            return
        buffer = np.empty(min(_CHUNK, entry.stop - entry.start), np.uint8)
        crc = 0
        for offset in range(entry.start, entry.stop, _CHUNK):
            part = buffer[: min(_CHUNK, entry.stop - offset)]
            file.read_into(part.data, offset)
            crc = crc32c(part, crc=crc)
        self._compare(crc, expected)

    def _compare(self, crc: int, expected: str) -> None:
        if as_hex(crc) != expected:
            raise self._rejected(
                f"its bytes have checksum {as_hex(crc)} where {expected} was written"
            )
        self._checksum = None  # checked; not again

    def _rejected(self, reason: str) -> RejectedError:
        remedy = "use an older checkpoint or a copy"
        return RejectedError(self._file.path, reason, remedy=remedy, tensor=self._key)


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """What was written: size, digest of the file, and checksum of each tensor's bytes."""

    name: str
    size: int
    sha256: str
    crc32c: Mapping[str, str]


class SafetensorsWriter:
    """Writes tensors one after the other into a new file; knows its digests at the end.

    The tensors are declared first, since the header stands before the data. They are then written
    in the declared order, each whole or in parts, so that no more than one part is in memory.

    Args:
        path: A file that does not exist yet.
        specs: The tensors. Put wide number types first: then every tensor is aligned.
        metadata: Strings for the header.
        operations: The disk.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        operations: FileOperations = REAL,
    ) -> None:
        header = header_bytes(specs, metadata=metadata)
        self.path = path
        self._specs = list(specs)
        self._operations = operations
        self._digest = FileDigest()
        self._checksums: dict[str, str] = {}
        self._crc = 0
        self._missing = 0
        self._size = 0
        self._result: WrittenFile | None = None
        size = len(header) + sum(spec.nbytes for spec in specs)
        self._file = operations.create_sized(path, size)
        self._writeback = Writeback(self._file)
        try:
            with self._digest.taking(memoryview(header)):
                self._put(memoryview(header))
        except BaseException:
            self._release()
            raise
        self._begin_next()

    def write(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Write the next tensor, or its next rows, in row-major order.

        Args:
            name: The tensor's name, to catch a wrong order.
            array: Elements of the declared type, any shape.
        """
        if not self._specs or self._specs[0].name != name:
            expected = self._specs[0].name if self._specs else "nothing more"
            raise ValueError(f"tensor '{name}' was written where {expected!r} was declared")
        spec = self._specs[0]
        if dtype_name(array.dtype) != spec.dtype or array.nbytes > self._missing:
            raise ValueError(
                f"tensor '{name}' was declared as {spec.dtype} {list(spec.shape)} and "
                f"{array.dtype} {list(array.shape)} was given"
            )
        data = little_endian_bytes(array)
        with self._digest.taking(data.data):
            for start in range(0, data.size, _CHUNK):
                part = data[start : start + _CHUNK]
                self._put(part.data)
                self._crc = crc32c(part, crc=self._crc)
        self._missing -= data.size
        self._finish_if_complete()

    def _begin_next(self) -> None:
        self._crc = 0
        self._missing = self._specs[0].nbytes if self._specs else 0

    def _finish_if_complete(self) -> None:
        if self._missing == 0:
            self._checksums[self._specs.pop(0).name] = as_hex(self._crc)
            self._begin_next()

    def _put(self, data: memoryview) -> None:
        self._operations.write(self._file, data)
        self._size += len(data)
        self._writeback.wrote(len(data))

    def _release(self) -> None:
        self._file.close()
        self._digest.close()

    def close(self) -> WrittenFile:
        """Force the file to the disk; ValueError if a declared tensor was not written whole."""
        if self._result is None:
            try:
                if self._specs:
                    raise ValueError(f"tensor '{self._specs[0].name}' was declared, not written")
                self._operations.sync(self._file)
            finally:
                self._release()
            self._result = WrittenFile(
                name=self.path.name,
                size=self._size,
                sha256=self._digest.hexdigest(),
                crc32c=self._checksums,
            )
        return self._result

    @property
    def result(self) -> WrittenFile:
        """What was written; only after :meth:`close`."""
        if self._result is None:
            raise ValueError(f"{self.path} is not closed yet")
        return self._result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._release()


def little_endian_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array's bytes in row-major order: a view, or a copy if they lie otherwise."""
    import numpy as np

    wanted = numpy_dtype(dtype_name(array.dtype))
    return np.ascontiguousarray(array, dtype=wanted).reshape(-1).view(np.uint8)
