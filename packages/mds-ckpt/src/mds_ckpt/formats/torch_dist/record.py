"""Records of ``*.distcp`` files: each is a whole torch file of one tensor or one object."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import OpenFile, RegularFile
from mds_ckpt.files.zip_directory import Member, locate, read_directory
from mds_ckpt.formats.torch_dist.metadata import Place
from mds_ckpt.pickles.build import item_size
from mds_ckpt.pickles.records import StorageRef, TensorRef
from mds_ckpt.pickles.unpickle import PickleError, PickleLimits, Unpickled, unpickle
from mds_ckpt.tensors.dtype import numpy_dtype

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

__all__ = ["RecordSource", "read_object"]

_COPY_AGAIN = "copy the checkpoint again from its source"
_UNTRUSTED = "list what it would import with `mds-ckpt scan`, and open it with nothing else"
_TENSOR_LIMITS = PickleLimits(size=1 << 20)
_OBJECT_LIMITS = PickleLimits()


class _Window(OpenFile):
    """Part of an open file, with offsets from its own beginning."""

    def __init__(self, file: OpenFile, place: Place, name: str) -> None:
        super().__init__(file.descriptor, file.path, place.length)
        self._base = place.offset
        self.name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` with the window's bytes from ``offset`` on."""
        if offset < 0 or offset + len(buffer) > self.size:
            raise self.refused("its record is cut off")
        super().read_into(buffer, self._base + offset)

    def refused(self, reason: str, remedy: str = _COPY_AGAIN) -> RejectedError:
        """The error that names this record."""
        return RejectedError(self.path, reason, remedy=remedy, tensor=self.name)


def _members(window: _Window) -> tuple[str, Mapping[str, Member]]:
    """The one folder of the record's zip, and its members."""
    if window.size < 4 or window.read(0, 4) != b"PK\x03\x04":
        raise window.refused("its record is not one that torch.save wrote")
    try:
        members = read_directory(window)
    except RejectedError as error:
        raise window.refused(f"in its record, {error.reason}") from None
    roots = {name.split("/", 1)[0] for name in members}
    root = roots.pop()
    if roots or f"{root}/data.pkl" not in members:
        raise window.refused("its record is a zip file without one data.pkl in one folder")
    order = members.get(f"{root}/byteorder")
    if order is not None and _content(window, order, 16) != b"little":
        raise window.refused("a big-endian machine wrote it", "save it on a little-endian one")
    return root, members


def _content(window: _Window, member: Member, limit: int) -> bytes:
    if member.size > limit:
        raise window.refused(f"its record's '{member.name}' has more than {limit} bytes")
    data = bytes(window.read(locate(window, member), member.size))
    # torch writes 0 when its checksums are switched off.
    if member.crc32 and zlib.crc32(data) != member.crc32:
        raise window.refused(f"its record's '{member.name}' differs from its checksum")
    return data


def _unpickled(window: _Window, member: Member, limits: PickleLimits) -> Unpickled:
    try:
        return unpickle(_content(window, member, limits.size), limits=limits)
    except PickleError as error:
        remedy = _UNTRUSTED if "would" in str(error) else _COPY_AGAIN
        raise window.refused(f"its pickle is refused {error}", remedy) from None


def _storage_member(
    window: _Window, members: Mapping[str, Member], root: str, storage: StorageRef
) -> Member:
    member = members.get(f"{root}/data/{storage.key}")
    expected = storage.numel * item_size(storage.dtype)
    if member is None or member.size != expected:
        raise window.refused(f"its record has no storage '{storage.key}' of {expected} bytes")
    return member


def read_object(place: Place, name: str) -> Any:
    """The object that a record holds, as inert records.

    Raises:
        RejectedError: The record is damaged or hostile.
    """
    with RegularFile(place.path, cache_links=True).open() as file:
        window = _Window(file, place, name)
        root, members = _members(window)
        unpickled = _unpickled(window, members[f"{root}/data.pkl"], _OBJECT_LIMITS)
        for storage in unpickled.storages.values():
            _storage_member(window, members, root, storage)
        return unpickled.value


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Elements of a record's tensor from ``offset`` of its flattened form on."""

    file: RegularFile
    place: Place
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    def read(self, start: int, stop: int) -> Array:
        """Elements ``[start, stop)`` as a 1-D array."""
        import numpy as np

        first, last = self.offset + start, self.offset + stop
        if first == last:
            return np.empty(0, numpy_dtype(self.dtype))
        with self.file.open() as file:
            window = _Window(file, self.place, self.name)
            member, tensor = self._storage(window)
            if _is_contiguous(tensor):
                return self._span(window, member, tensor.offset + first, tensor.offset + last)
            steps = zip(tensor.shape, tensor.stride, strict=True)
            end = tensor.offset + sum((extent - 1) * step for extent, step in steps) + 1
            span = self._span(window, member, tensor.offset, end)
        width = item_size(self.dtype)
        view = np.lib.stride_tricks.as_strided(
            span, tensor.shape, tuple(step * width for step in tensor.stride), writeable=False
        )
        return view.reshape(-1)[first:last].copy()

    def _span(self, window: _Window, member: Member, first: int, last: int) -> Array:
        """Elements ``[first, last)`` of the storage; checked where they are all of it."""
        import numpy as np

        width = item_size(self.dtype)
        data = bytearray((last - first) * width)
        window.read_into(memoryview(data), locate(window, member) + first * width)
        if len(data) == member.size and member.crc32 and zlib.crc32(data) != member.crc32:
            raise window.refused("its bytes differ from their checksum")
        return np.frombuffer(data, dtype=numpy_dtype(self.dtype))

    def check(self) -> None:
        """RejectedError unless the record's bytes are as they were written."""
        with self.file.open() as file:
            window = _Window(file, self.place, self.name)
            member, _ = self._storage(window)
            at, left, crc = locate(window, member), member.size, 0
            while left:
                block = window.read(at, min(left, 1 << 22))
                crc = zlib.crc32(block, crc)
                at, left = at + len(block), left - len(block)
        if member.crc32 and crc != member.crc32:
            raise window.refused("its bytes differ from their checksum")

    def _storage(self, window: _Window) -> tuple[Member, TensorRef]:
        """The member with the tensor's bytes, and how the tensor lies there."""
        root, members = _members(window)
        tensor = _unpickled(window, members[f"{root}/data.pkl"], _TENSOR_LIMITS).value
        if not isinstance(tensor, TensorRef):
            raise window.refused("its record does not hold a tensor")
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise window.refused(
                f"its record is {tensor.dtype} {list(tensor.shape)} where .metadata says "
                f"{self.dtype} {list(self.shape)}"
            )
        return _storage_member(window, members, root, tensor.storage), tensor


def _is_contiguous(tensor: TensorRef) -> bool:
    expected = 1
    for extent, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True
