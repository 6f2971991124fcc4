"""Look into numpy's files and archives without numpy: which arrays are pickles, and their bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from mds_ckpt.files.regular_file import OpenFile

__all__ = ["elements_start", "holds_objects", "numpy_archive"]

_HEAD = 1 << 16
_WINDOW = 8 << 20


def numpy_archive(file: OpenFile, *, most: int) -> dict[str, bytes]:
    """The members of a compressed ``.npz``, as far as they matter; empty if it is none.

    Torch never compresses, so its reader refuses such files; numpy does. Every local header counts,
    whatever the directory at the end says.

    Args:
        file: A zip file.
        most: Bytes that are unpacked of an array of objects; of others only the beginning is.
    """
    found: dict[str, bytes] = {}
    for at in _local_headers(file):
        header = bytes(file.read(at, 30))
        method, name_size = header[8] | header[9] << 8, int.from_bytes(header[26:28], "little")
        start = at + 30 + name_size + int.from_bytes(header[28:30], "little")
        name = bytes(file.read(at + 30, min(name_size, file.size - at - 30)))
        if method not in (0, 8) or not name.endswith(b".npy") or start >= file.size:
            return {}
        data = _inflated(file, start, _HEAD, is_packed=method == 8)
        if not data.startswith(b"\x93NUMPY"):
            return {}
        if holds_objects(data):
            data = _inflated(file, start, most, is_packed=method == 8)
        found[name.decode("utf-8", "replace")] = data
    return found


def _local_headers(file: OpenFile) -> Iterator[int]:
    at = 0
    while at < file.size:
        window = bytes(file.read(at, min(file.size - at, _WINDOW + 3)))
        found = window.find(b"PK\x03\x04")
        while 0 <= found < _WINDOW:
            if file.size - at - found >= 30:
                yield at + found
            found = window.find(b"PK\x03\x04", found + 4)
        at += _WINDOW


def _inflated(file: OpenFile, start: int, most: int, *, is_packed: bool) -> bytes:
    """The first ``most`` bytes of a member, unpacked if need be; fewer if it breaks."""
    if not is_packed:
        return bytes(file.read(start, min(most, file.size - start)))
    unpacker, parts, size = zlib.decompressobj(-15), [], 0
    while start < file.size and size < most and not unpacker.eof:
        raw = bytes(file.read(start, min(_HEAD, file.size - start)))
        start += len(raw)
        try:
            part = unpacker.decompress(raw, most - size)
        except zlib.error:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def holds_objects(data: bytes) -> bool:
    """Whether a numpy file is an array of objects, which are a pickle."""
    start = elements_start(data)
    return b"'O'" in data[:start] or b"|O" in data[:start]


def elements_start(data: bytes) -> int:
    """Where the elements of a numpy file begin."""
    width = 2 if data[6:7] == b"\x01" else 4
    return 8 + width + int.from_bytes(data[8 : 8 + width], "little")
