"""Safetensors files: a strict reader of headers and a writer that streams, digests and fsyncs.

The reader refuses what the official library still accepts: duplicate keys, unknown members, a
header that does not begin with ``{``, shapes whose product overflows, headers made to exhaust
memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mds_ckpt import strict_json
from mds_ckpt.checksum import as_hex, crc32c
from mds_ckpt.commit import REAL, FileOperations
from mds_ckpt.dtype import ITEM_SIZES, dtype_name, numpy_dtype
from mds_ckpt.errors import RejectedError
from mds_ckpt.escape import printable
from mds_ckpt.regular_file import OpenFile, RegularFile

if TYPE_CHECKING:
    import numpy as np

HEADER_LIMIT = 100_000_000
MOST_TENSORS = 200_000
"""Tensors of one file; a larger number is made to exhaust memory."""
_MOST_WIDE_TEXT = 25_000_000
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, number type and shape of a tensor that is to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a file: type, shape and bytes ``[start, stop)`` from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What the beginning of a safetensors file says about the rest."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


class SafetensorsFile:
    """A safetensors file; its header is read and checked at the first question.

    Args:
        path: The file.
        cache_links: Follow links of a Hugging Face cache.
    """

    def __init__(self, path: Path, *, cache_links: bool = False) -> None:
        self.path = path
        self.file = RegularFile(path, cache_links=cache_links)
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


def read_header(file: OpenFile) -> Header:
    """The header of an open safetensors file, checked against the file's size.

    Raises:
        RejectedError: If the file breaks a rule of the format, or of this reader.
    """
    try:
        if file.size < 8:
            raise _HeaderError(f"it has {file.size} bytes, fewer than the 8 of a header's length")
        (length,) = struct.unpack("<Q", file.read(0, 8))
        if length > HEADER_LIMIT:
            raise _HeaderError(f"its header claims {length} bytes and {HEADER_LIMIT} are read")
        if length > file.size - 8:
            raise _HeaderError(f"its header claims {length} bytes and the file has {file.size}")
        return parse_header(bytes(file.read(8, length)), file_size=file.size)
    except (_HeaderError, strict_json.JsonError) as error:
        raise RejectedError(
            file.path,
            f"this is not a valid safetensors file, {error}",
            remedy="get the file again from where it was written",
            tensor=getattr(error, "tensor", None),
        ) from None


class _HeaderError(ValueError):
    def __init__(self, message: str, *, tensor: str | None = None) -> None:
        super().__init__(message)
        self.tensor = tensor


def parse_header(text: bytes, *, file_size: int) -> Header:
    """The header that ``text`` is, for a file of ``file_size`` bytes; ValueError if it is wrong."""
    if not text.startswith(b"{"):
        raise _HeaderError("its header does not begin with '{'")
    if len(text) > _MOST_WIDE_TEXT and not text.isascii():
        raise _HeaderError(f"its header has {len(text)} bytes and is not plain ASCII")
    if text.count(b",") > 16 * MOST_TENSORS:
        raise _HeaderError(f"its header has more than {16 * MOST_TENSORS} values")
    members = strict_json.parse(text, most_containers=3 * MOST_TENSORS + 2)
    metadata = members.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _HeaderError("its __metadata__ is not an object of strings")
    data_start = 8 + len(text)
    entries = {name: _entry(name, value, data_start) for name, value in members.items()}
    _check_layout(entries, data_start=data_start, file_size=file_size)
    return Header(entries, metadata)


def _entry(name: str, value: Any, data_start: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise _HeaderError("its members are not dtype, shape and data_offsets", tensor=name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise _HeaderError(f"dtype '{printable(str(dtype))}' is not known", tensor=name)
    if not _are_counts(shape) or len(shape) > 64:
        raise _HeaderError("its shape is not a list of at most 64 whole numbers", tensor=name)
    if not _are_counts(offsets) or len(offsets) != 2:
        raise _HeaderError("its data_offsets are not two whole numbers", tensor=name)
    if math.prod(extent for extent in shape if extent) * ITEM_SIZES[dtype] >= 2**63:
        raise _HeaderError(f"the product of its shape {shape} overflows 2**63", tensor=name)
    start, stop = offsets
    nbytes = math.prod(shape) * ITEM_SIZES[dtype]
    if stop - start != nbytes:
        raise _HeaderError(
            f"its shape {shape} of {dtype} takes {nbytes} bytes and its data_offsets give "
            f"{stop - start}",
            tensor=name,
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(entries: Mapping[str, TensorEntry], *, data_start: int, file_size: int) -> None:
    """Tensors follow each other without hole or overlap, from the header to the file's end."""
    position = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        if entry.start != position:
            what = "overlaps another tensor" if entry.start < position else "follows a hole"
            raise _HeaderError(f"its data at byte {entry.start} {what}", tensor=entry.name)
        position = entry.stop
    if position != file_size:
        raise _HeaderError(f"its tensors end at byte {position} and the file has {file_size}")


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
        self._digest = hashlib.sha256()
        self._checksums: dict[str, str] = {}
        self._crc = 0
        self._missing = 0
        self._size = 0
        self._result: WrittenFile | None = None
        self._file = operations.create(path)
        try:
            self._put(memoryview(header))
        except BaseException:
            self._file.close()
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
        for part in little_endian_chunks(array):
            self._put(part.data)
            self._crc = crc32c(part, crc=self._crc)
            self._missing -= part.size
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
        self._digest.update(data)
        self._size += len(data)

    def close(self) -> WrittenFile:
        """Force the file to the disk; ValueError if a declared tensor was not written whole."""
        if self._result is None:
            with self._file:
                if self._specs:
                    raise ValueError(f"tensor '{self._specs[0].name}' was declared, not written")
                self._operations.sync(self._file)
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
            self._file.close()


def header_bytes(specs: Sequence[TensorSpec], *, metadata: Mapping[str, str] | None) -> bytes:
    """Length and header of a file with these tensors, padded so that the data starts at 8 n."""
    members: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for spec in specs:
        if spec.name in members:
            raise ValueError(f"tensor '{spec.name}' is declared twice")
        stop = position + spec.nbytes
        offsets = [position, stop]
        members[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": offsets}
        position = stop
    text = json.dumps(members, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def little_endian_chunks(
    array: np.ndarray[Any, Any],
) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The array's bytes in row-major order as views of at most a few MiB (or one copy of it)."""
    import numpy as np

    wanted = numpy_dtype(dtype_name(array.dtype))
    flat = np.ascontiguousarray(array, dtype=wanted).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]
