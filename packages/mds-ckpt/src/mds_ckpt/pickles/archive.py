"""Open the files that ``torch.save`` writes: the pickle as records, the tensors when asked for.

A torch file is a zip of ``NAME/data.pkl`` and ``NAME/data/KEY`` (since torch 1.6), or a row of
pickles with the storages behind (0.1.10 to 1.5). Bytes of a tensor are read with ``pread``, only
those that are asked for, so that memory holds what the caller keeps and nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import OpenFile, RegularFile
from mds_ckpt.files.zip_directory import Member, locate, read_directory
from mds_ckpt.pickles.build import item_size
from mds_ckpt.pickles.legacy_archive import read_legacy
from mds_ckpt.pickles.records import StorageRef, TensorRef
from mds_ckpt.pickles.unpickle import PickleError, PickleLimits, Unpickled, unpickle
from mds_ckpt.tensors.dtype import numpy_dtype

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["TorchFile", "open_torch_file", "read_pickle_file"]

_COPY_AGAIN = "copy the file again from its source"
_UNTRUSTED = "list what it would import with `mds-ckpt scan`, and open it with nothing else"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf": "7z",
    b"BZh": "bzip2",
    b"\xfd7zX": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a storage's bytes are: a zip member, or an offset in an old file."""

    member: Member | None
    offset: int


class TorchFile:
    """One torch file, open by path only: no descriptor and no tensor is held.

    Attributes:
        value: What the file holds; tensors are ``TensorRef`` records.
    """

    def __init__(
        self, file: RegularFile, unpickled: Unpickled, places: Mapping[str, _Place]
    ) -> None:
        self._file = file
        self._places = places
        self._starts: dict[str, int] = {}
        self.path = file.path
        self.value = unpickled.value
        self.storages = unpickled.storages

    def read(self, tensor: TensorRef, *, start: int = 0, stop: int | None = None) -> Array:
        """Elements ``[start, stop)`` of the flattened ``tensor``; in its own shape when all.

        Returns:
            A new array that owns its memory.
        """
        count = tensor.numel
        is_all = start == 0 and stop in (None, count)
        stop = count if stop is None else stop
        if not 0 <= start <= stop <= count:
            raise ValueError(f"range [{start}, {stop}) lies outside {count} elements")
        if _is_contiguous(tensor):
            array = self._read_span(tensor, tensor.offset + start, tensor.offset + stop)
            return array.reshape(tensor.shape) if is_all else array
        whole = self._read_strided(tensor)
        return whole if is_all else whole.reshape(-1)[start:stop].copy()

    def damaged_members(self) -> list[str]:
        """Names of the members that differ from their checksums; old files have none."""
        with self._file.open() as file:
            members = read_directory(file).values() if self._is_zip() else ()
            return [
                member.name
                for member in members
                if member.crc32 and _crc32(file, member) != member.crc32
            ]

    def _is_zip(self) -> bool:
        return all(place.member is not None for place in self._places.values())

    def _read_span(self, tensor: TensorRef, first: int, last: int) -> Array:
        """Elements ``[first, last)`` of the tensor's storage."""
        import numpy as np

        size = item_size(tensor.dtype)
        array = np.empty(last - first, numpy_dtype(tensor.dtype))
        if array.size:
            place = self._places[tensor.storage.key]
            with self._file.open() as file:
                base = self._start(file, tensor.storage.key, place)
                file.read_into(array.view(np.uint8).data, base + first * size)
        return array

    def _start(self, file: OpenFile, key: str, place: _Place) -> int:
        """Where a storage begins; its local header is checked once, as the file can't change."""
        if key not in self._starts:
            found = place.offset if place.member is None else locate(file, place.member)
            self._starts[key] = found
        return self._starts[key]

    def _read_strided(self, tensor: TensorRef) -> Array:
        import numpy as np

        steps = zip(tensor.shape, tensor.stride, strict=True)
        reach = sum((extent - 1) * step for extent, step in steps)
        span = self._read_span(tensor, tensor.offset, tensor.offset + reach + 1)
        size = item_size(tensor.dtype)
        view = np.lib.stride_tricks.as_strided(
            span, tensor.shape, tuple(step * size for step in tensor.stride), writeable=False
        )
        return np.ascontiguousarray(view)


def open_torch_file(path: Path, *, limits: PickleLimits | None = None) -> TorchFile:
    """Open a file that ``torch.save`` wrote. Reads its pickle and nothing of the tensors.

    Raises:
        RejectedError: Not such a file, damaged, or hostile.
    """
    limits = limits or PickleLimits()
    regular = RegularFile(path, cache_links=True)
    with regular.open() as file:
        head = bytes(file.read(0, min(file.size, 512)))
        if head.startswith(b"PK\x03\x04"):
            return _open_zip(regular, file, limits)
        _refuse_other_kinds(file, head)
        try:
            unpickled, offsets = read_legacy(file, limits)
        except PickleError as error:
            raise _pickle_refused(path, error, None) from None
        return TorchFile(regular, unpickled, {k: _Place(None, at) for k, at in offsets.items()})


def read_pickle_file(path: Path, *, limits: PickleLimits | None = None) -> Any:
    """The value of a file that is one pickle and nothing else."""
    limits = limits or PickleLimits()
    with RegularFile(path, cache_links=True).open() as file:
        if file.size > limits.size:
            raise RejectedError(
                path, f"it has {file.size} bytes", remedy=f"at most {limits.size} are read"
            )
        data = bytes(file.read(0, file.size))
    try:
        return unpickle(data, limits=limits).value
    except PickleError as error:
        raise _pickle_refused(path, error, None) from None


def _pickle_refused(path: Path, error: PickleError, member: str | None) -> RejectedError:
    is_hostile = "would" in str(error)
    return RejectedError(
        path,
        f"its pickle is refused {error}",
        remedy=_UNTRUSTED if is_hostile else _COPY_AGAIN,
        tensor=member,
    )


def _refuse_other_kinds(file: OpenFile, head: bytes) -> None:
    if not head:
        raise RejectedError(file.path, "it is empty", remedy=_COPY_AGAIN)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise RejectedError(
                file.path, f"it is compressed with {name}", remedy=f"unpack it with {name} first"
            )
    if head[257:262] == b"ustar":
        raise RejectedError(
            file.path,
            "it is a tar file as torch wrote before 0.1.10 (2017)",
            remedy="load it with a torch of that time, in a machine without anything to lose, "
            "and save it again",
        )
    if not head.startswith(b"\x80"):
        raise RejectedError(
            file.path, "it is not a file that torch.save wrote", remedy="check the path"
        )


def _open_zip(regular: RegularFile, file: OpenFile, limits: PickleLimits) -> TorchFile:
    members = read_directory(file)
    root = _root(file, members)
    _check_kind(file, members, root)
    unpickled = _read_zip_pickle(file, members[f"{root}/data.pkl"], limits)
    places = {}
    for key, storage in unpickled.storages.items():
        places[key] = _Place(_storage_member(file, members, f"{root}/data/{key}", storage), 0)
    return TorchFile(regular, unpickled, places)


def _root(file: OpenFile, members: Mapping[str, Member]) -> str:
    """The one folder that everything in a torch zip lies in."""
    roots = {name.split("/", 1)[0] for name in members}
    if len(roots) != 1 or f"{next(iter(roots))}/data.pkl" not in members:
        raise RejectedError(
            file.path,
            "it is a zip file without one data.pkl in one folder",
            remedy="check that torch.save wrote it",
        )
    return roots.pop()


def _check_kind(file: OpenFile, members: Mapping[str, Member], root: str) -> None:
    if f"{root}/constants.pkl" in members:
        raise RejectedError(
            file.path,
            "it is a TorchScript program, not a checkpoint",
            remedy="save its state_dict instead",
        )
    order = members.get(f"{root}/byteorder")
    if order is not None and _read_small(file, order, 16) != b"little":
        raise RejectedError(
            file.path,
            "it was written by a big-endian machine",
            remedy="save it again on a little-endian one",
        )


def _read_small(file: OpenFile, member: Member, limit: int) -> bytes:
    if member.size > limit:
        raise RejectedError(
            file.path,
            f"the member has {member.size} bytes, more than {limit}",
            remedy="this is no checkpoint that torch wrote",
            tensor=member.name,
        )
    return bytes(file.read(locate(file, member), member.size))


def _read_zip_pickle(file: OpenFile, member: Member, limits: PickleLimits) -> Unpickled:
    data = _read_small(file, member, limits.size)
    # torch writes 0 when its checksums are switched off.
    if member.crc32 and zlib.crc32(data) != member.crc32:
        raise RejectedError(
            file.path, "its checksum differs", remedy=_COPY_AGAIN, tensor=member.name
        )
    try:
        return unpickle(data, limits=limits)
    except PickleError as error:
        raise _pickle_refused(file.path, error, member.name) from None


def _storage_member(
    file: OpenFile, members: Mapping[str, Member], name: str, storage: StorageRef
) -> Member | None:
    expected = storage.numel * item_size(storage.dtype)
    member = members.get(name)
    if member is None and expected == 0:
        return None
    if member is None or member.size != expected:
        found = "is missing" if member is None else f"has {member.size} bytes"
        raise RejectedError(
            file.path,
            f"the storage {found} where {expected} are stated",
            remedy=_COPY_AGAIN,
            tensor=name,
        )
    return member


def _crc32(file: OpenFile, member: Member) -> int:
    at, left, crc = locate(file, member), member.size, 0
    while left:
        block = file.read(at, min(left, 1 << 22))
        crc = zlib.crc32(block, crc)
        at, left = at + len(block), left - len(block)
    return crc


def _is_contiguous(tensor: TensorRef) -> bool:
    expected = 1
    for extent, step in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if extent != 1 and step != expected and tensor.numel:
            return False
        expected *= extent
    return True
