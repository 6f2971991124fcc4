"""The directory of a zip file as torch writes it: stored members only, checked before use.

Zip files can say different things in different places, and readers that believe different places
see different contents. Here everything must agree, lie inside the file, and overlap nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import OpenFile

__all__ = ["Member", "locate", "read_directory"]

MOST_MEMBERS = 200_000
LARGEST_DIRECTORY = 64 << 20

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x0001 | 0x0040 | 0x2000
_SIZES_FOLLOW = 0x0008
_MASK32, _MASK16 = 0xFFFFFFFF, 0xFFFF
_COPY_AGAIN = "copy the file again from its source"
_WRITE_AGAIN = "save it again with torch.save, which never does this"


@dataclass(frozen=True, slots=True)
class Member:
    """A stored member: its name, where its local header is, its size, and where the next begins."""

    name: str
    header: int
    size: int
    crc32: int
    bound: int


@dataclass(frozen=True, slots=True)
class _End:
    count: int
    offset: int
    size: int


def read_directory(file: OpenFile) -> Mapping[str, Member]:
    """All members by their full name.

    Raises:
        RejectedError: The file is truncated, compressed, encrypted, ambiguous, or too large.
    """
    end = _read_end(file)
    raw = bytes(file.read(end.offset, end.size))
    entries = list(_entries(file, raw, end))
    bounded = _bound(file, entries, end)
    members: dict[str, Member] = {}
    for member in bounded:
        if member.name in members:
            raise _refused(file, "two members have this name", _WRITE_AGAIN, member.name)
        members[member.name] = member
    return members


def locate(file: OpenFile, member: Member) -> int:
    """Where the bytes of ``member`` begin, after checking that its local header agrees."""
    raw = file.read(member.header, _LOCAL.size)
    magic, _, flags, method, _, _, _, packed, size, name_size, extra = _LOCAL.unpack(raw)
    start = member.header + _LOCAL.size + name_size + extra
    if magic != b"PK\x03\x04" or start + member.size > member.bound:
        raise _refused(file, "its local header is damaged", _COPY_AGAIN, member.name)
    name = bytes(file.read(member.header + _LOCAL.size, name_size))
    if name != member.name.encode():
        raise _refused(file, f"its local header calls it {name[:80]!r}", _WRITE_AGAIN, member.name)
    if flags & _ENCRYPTED or method:
        raise _refused(file, "its local header says it is packed", _WRITE_AGAIN, member.name)
    is_stated = not flags & _SIZES_FOLLOW and size != _MASK32
    if is_stated and (size != member.size or packed != member.size):
        raise _refused(file, "its local header gives another size", _WRITE_AGAIN, member.name)
    return int(start)


def _refused(file: OpenFile, reason: str, remedy: str, name: str | None = None) -> RejectedError:
    return RejectedError(file.path, reason, remedy=remedy, tensor=name)


def _read_end(file: OpenFile) -> _End:
    at = file.size - _END.size
    if at < 0:
        raise _refused(file, f"it has only {file.size} bytes", _COPY_AGAIN)
    magic, disk, first_disk, here, count, size, offset, comment = _END.unpack(
        file.read(at, _END.size)
    )
    if magic != b"PK\x05\x06" or comment:
        raise _refused(file, "the zip directory is not at its end; it is truncated", _COPY_AGAIN)
    if disk or first_disk or here != count:
        raise _refused(file, "it is one part of a divided zip file", "join its parts first")
    end, limit = _End(count, offset, size), at
    wide = _read_wide_end(file, at)
    if wide is not None:
        narrow = ((count, wide[0].count, _MASK16), (offset, wide[0].offset, _MASK32))
        if any(small not in (large, mask) for small, large, mask in narrow):
            raise _refused(file, "its two directory records differ", _WRITE_AGAIN)
        end, limit = wide
    if end.count > MOST_MEMBERS or end.size > LARGEST_DIRECTORY:
        reason = f"its directory has {end.count} members in {end.size} bytes"
        raise _refused(file, reason, f"at most {MOST_MEMBERS} members are read")
    if end.offset + end.size != limit:
        raise _refused(file, "bytes stand before or behind its directory", _COPY_AGAIN)
    return end


def _read_wide_end(file: OpenFile, end: int) -> tuple[_End, int] | None:
    """The zip64 record before the end record, and where it begins; None if there is none."""
    at = end - _END64_LOCATOR.size
    if at < _END64.size:
        return None
    magic, disk, offset, disks = _END64_LOCATOR.unpack(file.read(at, _END64_LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    if disk or disks > 1 or offset != at - _END64.size:
        raise _refused(file, "its zip64 record is not where it should be", _WRITE_AGAIN)
    magic, length, *_, here, count, size, start = _END64.unpack(file.read(offset, _END64.size))
    if magic != b"PK\x06\x06" or length != _END64.size - 12 or here != count:
        raise _refused(file, "its zip64 record is damaged", _COPY_AGAIN)
    return _End(count, start, size), offset


def _entries(file: OpenFile, raw: bytes, end: _End) -> Iterator[Member]:
    at = 0
    for _ in range(end.count):
        if at + _CENTRAL.size > len(raw):
            raise _refused(file, "its zip directory is cut off", _COPY_AGAIN)
        fields = _CENTRAL.unpack_from(raw, at)
        name_size, extra_size, comment_size = fields[10:13]
        at += _CENTRAL.size
        stop = at + name_size + extra_size + comment_size
        if fields[0] != b"PK\x01\x02" or stop > len(raw):
            raise _refused(file, "its zip directory is damaged", _COPY_AGAIN)
        name = _checked_name(file, raw[at : at + name_size])
        extra = raw[at + name_size : at + name_size + extra_size]
        yield _entry(file, name, fields, extra)
        at = stop
    if at != len(raw):
        raise _refused(file, "its zip directory holds more than it counts", _WRITE_AGAIN)


def _entry(file: OpenFile, name: str, fields: tuple[int, ...], extra: bytes) -> Member:
    flags, method = fields[3], fields[4]
    crc32, packed, size = fields[7:10]
    disk, header = fields[13], fields[16]
    if flags & _ENCRYPTED:
        raise _refused(file, "the member is encrypted", _WRITE_AGAIN, name)
    if method:
        raise _refused(file, f"the member is compressed (method {method})", _WRITE_AGAIN, name)
    if disk:
        raise _refused(file, "the member lies in another part", "join the parts first", name)
    if _MASK32 in (packed, size, header):
        size, packed, header = _widen(file, name, extra, (size, packed, header))
    if packed != size:
        raise _refused(file, f"its sizes differ, {packed} and {size}", _WRITE_AGAIN, name)
    return Member(name, header, size, crc32, 0)


def _widen(
    file: OpenFile, name: str, extra: bytes, narrow: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Size, packed size and header offset, taken from the zip64 field where they are masked."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        body = extra[at + 4 : at + 4 + length]
        if kind == 1 and len(body) == length:
            count = len(body) // 8
            values = iter(struct.unpack_from(f"<{count}Q", body))
            wide = [next(values, -1) if value == _MASK32 else value for value in narrow]
            if -1 not in wide:
                return wide[0], wide[1], wide[2]
        at += 4 + length
    raise _refused(file, "its zip64 sizes are missing", _COPY_AGAIN, name)


def _checked_name(file: OpenFile, raw: bytes) -> str:
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused(file, f"a member's name {raw[:80]!r} is not UTF-8", _WRITE_AGAIN) from None
    parts = PurePosixPath(name).parts
    is_plain = name and len(raw) <= 1024 and "\0" not in name and "\\" not in name
    if not is_plain or name.startswith("/") or ".." in parts:
        raise _refused(file, "a member's name leads out of the file", _WRITE_AGAIN, name[:200])
    return name


def _bound(file: OpenFile, entries: list[Member], end: _End) -> Iterator[Member]:
    """The members in file order, each with the offset that it must not reach past."""
    ordered = sorted(entries, key=lambda member: member.header)
    bounds = [member.header for member in ordered[1:]] + [end.offset]
    if ordered and ordered[0].header:
        raise _refused(file, "bytes stand before its first member", _WRITE_AGAIN)
    for member, bound in zip(ordered, bounds, strict=True):
        if member.header + _LOCAL.size + len(member.name.encode()) + member.size > bound:
            raise _refused(
                file, "the member runs into the next or past the end", _COPY_AGAIN, member.name
            )
        yield Member(member.name, member.header, member.size, member.crc32, bound)
