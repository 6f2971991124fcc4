"""The header of a safetensors file: strict parsing, and writing.

The parser refuses what the official library still accepts: duplicate keys, unknown members, a
header that does not begin with ``{``, shapes whose product overflows, headers made to exhaust
memory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.escape import printable
from mds_ckpt.files import strict_json
from mds_ckpt.files.regular_file import OpenFile
from mds_ckpt.tensors.dtype import ITEM_SIZES

HEADER_LIMIT = 100_000_000
MOST_TENSORS = 200_000
"""Tensors of one file; a larger number is made to exhaust memory."""
_MOST_WIDE_TEXT = 25_000_000


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
