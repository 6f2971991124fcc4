"""The torch files of 0.1.10 to 1.5: a row of pickles, then the storages one after the other."""

from __future__ import annotations

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import OpenFile
from mds_ckpt.pickles.build import item_size
from mds_ckpt.pickles.unpickle import PickleLimits, Unpickled, unpickle_next

__all__ = ["read_legacy"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_COPY_AGAIN = "copy the file again from its source"


def read_legacy(file: OpenFile, limits: PickleLimits) -> tuple[Unpickled, dict[str, int]]:
    """The main pickle, and the offset of each storage's first byte.

    Raises:
        PickleError: One of the pickles is refused.
        RejectedError: The file is of another kind, or its storages do not fill it.
    """
    data = bytes(file.read(0, min(file.size, limits.size)))
    magic = unpickle_next(data, 0, limits=limits)
    if magic.value != _MAGIC:
        raise RejectedError(
            file.path, "it is a pickle, but not one that torch.save wrote", remedy="check the path"
        )
    protocol = unpickle_next(data, magic.end, limits=limits)
    system = unpickle_next(data, protocol.end, limits=limits)
    unpickled = unpickle_next(data, system.end, limits=limits)
    keys = unpickle_next(data, unpickled.end, limits=limits)
    is_little = isinstance(system.value, dict) and system.value.get("little_endian") is True
    if protocol.value != _PROTOCOL or not is_little:
        raise RejectedError(
            file.path, "it was written by an unknown kind of torch", remedy="save it again"
        )
    return unpickled, _offsets(file, unpickled, keys)


def _offsets(file: OpenFile, unpickled: Unpickled, keys: Unpickled) -> dict[str, int]:
    """A storage is its number of elements in 8 bytes, then the elements; in the order of keys."""
    at, places = keys.end, dict[str, int]()
    names = keys.value if isinstance(keys.value, list) else []
    for key in names:
        storage = unpickled.storages.get(key) if isinstance(key, str) else None
        if storage is None or key in places or at + 8 > file.size:
            break
        numel = int.from_bytes(file.read(at, 8), "little")
        places[key] = at + 8
        at += 8 + numel * item_size(storage.dtype)
        if numel != storage.numel or at > file.size:
            break
    if at != file.size or set(places) != set(unpickled.storages):
        raise RejectedError(file.path, "its storages do not fill it exactly", remedy=_COPY_AGAIN)
    return places
