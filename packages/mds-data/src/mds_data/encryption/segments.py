"""A sealed file: a header, then segments of AES-256-GCM that can be opened one by one. No files.

Each segment is bound to its number, to the file's header, to the path within the folder and to the
folder. So a segment that was changed, cut off, moved, or taken from elsewhere does not open.
"""

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

# The same file lies in two packages.
from ..errors import SealedError  # noqa: TID252
from .library import library

__all__ = [
    "BLOCK_SIZE",
    "SEGMENT_SIZE",
    "Cut",
    "FileKey",
    "SealedFile",
    "cut_at",
    "sealed_blocks",
    "sealed_size",
]

MAGIC = b"\x89MDSEAL\n"
MAJOR, MINOR = 1, 0
HEADER_SIZE = 64
SEGMENT_SIZE = 2**20
"""Bytes of a segment where nothing speaks for another size."""
BLOCK_SIZE = SEGMENT_SIZE
"""Smaller segments are read, sealed and written together, about so many bytes at a time."""
TAG_SIZE = 16
_HEADER = struct.Struct("<8sHHIQQ16s16x")
_NONCE = struct.Struct("<QB3x")
_PLACE_SIZE = 9
"""Of the nonce: the segment's number and kind, which the cipher is also bound to."""
_SEGMENT, _LAST, _TABLE = 0, 1, 2
_LARGEST_SEGMENT = 2**30
_MOST_LENGTHS = 2**24
_PURPOSE = b"mds-encryption/1 file\0"

Buffer = bytes | bytearray | memoryview
Cut = int | Sequence[int]
"""Bytes of every segment but the last one, or of each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKey:
    """What one sealed file is bound to, and the key of its folder."""

    data_key: bytes = field(repr=False)
    folder: bytes
    """[16] identity of the folder."""
    path: str
    """Within the folder, ``/`` between names."""
    file_id: bytes
    """[16] random; made anew whenever a file is written."""


class _Cipher:
    """AES-256-GCM for the segments of one file."""

    def __init__(self, key: FileKey, header: bytes) -> None:
        path = key.path.encode()
        hashes = library("cryptography.hazmat.primitives.hashes")
        kdf = library("cryptography.hazmat.primitives.kdf.hkdf").HKDF(
            algorithm=hashes.SHA256(),
            length=32,
            salt=key.file_id,
            info=_PURPOSE + key.folder + path,
        )
        aead = library("cryptography.hazmat.primitives.ciphers.aead")
        self._aes: Any = aead.AESGCM(kdf.derive(key.data_key))
        self._context = hashlib.sha256(_PURPOSE + key.folder + header + path).digest()
        self.refused: type[Exception] = library("cryptography.exceptions").InvalidTag

        self._in_place = hasattr(self._aes, "encrypt_into")  # since cryptography 47

    def seal(self, data: Buffer, number: int, kind: int, *, into: memoryview) -> None:
        """Seal a segment into a place that has its size and the tag's."""
        nonce = _NONCE.pack(number, kind)
        bound = self._context + nonce[:_PLACE_SIZE]
        if self._in_place:
            self._aes.encrypt_into(nonce, data, bound, into)
        else:
            into[:] = self._aes.encrypt(nonce, data, bound)

    def open(self, data: Buffer, number: int, kind: int) -> bytes:
        nonce = _NONCE.pack(number, kind)
        opened: bytes = self._aes.decrypt(nonce, data, self._context + nonce[:_PLACE_SIZE])
        return opened

    def open_into(self, data: Buffer, number: int, kind: int, into: memoryview) -> None:
        """Open a segment into a place that has its plain size."""
        if self._in_place:
            nonce = _NONCE.pack(number, kind)
            self._aes.decrypt_into(nonce, data, self._context + nonce[:_PLACE_SIZE], into)
        else:
            into[:] = self.open(data, number, kind)


def _lengths(size: int, cut: Cut) -> list[int]:
    """Bytes of each segment; an empty file has one empty segment."""
    if isinstance(cut, int):
        whole, rest = divmod(size, cut)
        return [cut] * whole + ([rest] if rest or not whole else [])
    if sum(cut) != size or min(cut, default=0) < 0:
        raise ValueError(f"segments of {sum(cut)} bytes can't hold a file of {size}")
    return list(cut) or [0]


def sealed_size(size: int, cut: Cut) -> int:
    """Bytes of the sealed form of a file of ``size`` bytes."""
    count = len(_lengths(size, cut))
    table = 0 if isinstance(cut, int) else 4 * count + TAG_SIZE
    return HEADER_SIZE + table + size + TAG_SIZE * count


def sealed_blocks(
    read: Callable[[int], Buffer], *, size: int, cut: Cut, key: FileKey
) -> Iterator[bytes | bytearray]:
    """The bytes of a sealed file, in blocks of a segment, or of several where these are small.

    Args:
        read: Gives the next so many bytes of the plain file.
        size: Bytes of the plain file.
        cut: Where segments end.
        key: What the file is bound to; its ``file_id`` must never have been used before.
    """
    lengths = _lengths(size, cut)
    fixed = cut if isinstance(cut, int) else 0
    header = _HEADER.pack(MAGIC, MAJOR, MINOR, fixed, size, len(lengths), key.file_id)
    cipher = _Cipher(key, header)
    yield header
    if not fixed:
        table = struct.pack(f"<{len(lengths)}I", *lengths)
        yield _sealed_block(cipher, table, [len(table)], first=0, kinds=[_TABLE])
    for first, stop in _blocks(lengths):
        block = lengths[first:stop]
        data = read(sum(block))
        if len(data) != sum(block):
            raise ValueError(f"{key.path}: ended after {len(data)} of {sum(block)} bytes")
        kinds = [_SEGMENT] * len(block)
        if stop == len(lengths):
            kinds[-1] = _LAST
        yield _sealed_block(cipher, data, block, first=first, kinds=kinds)


def _blocks(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Numbers of the first segment, and of the one after the last, of about as many bytes each."""
    first = size = 0
    for number, length in enumerate(lengths):
        if size and size + length > BLOCK_SIZE:
            yield first, number
            first, size = number, 0
        size += length
    yield first, len(lengths)


def _sealed_block(
    cipher: _Cipher, data: Buffer, lengths: Sequence[int], *, first: int, kinds: Sequence[int]
) -> bytearray:
    """Segments side by side, sealed."""
    sealed = bytearray(len(data) + TAG_SIZE * len(lengths))
    plain, into = memoryview(data), memoryview(sealed)
    for number, (length, kind) in enumerate(zip(lengths, kinds, strict=True), first):
        cipher.seal(plain[:length], number, kind, into=into[: length + TAG_SIZE])
        plain, into = plain[length:], into[length + TAG_SIZE :]
    return sealed


class SealedFile:
    """A sealed file, of which any part can be read; a part opens only the segments it touches.

    Args:
        read_at: Gives the bytes from an offset on, so many of them.
        stored: Bytes of the sealed file.
        key: What the file must be bound to.
        name: How messages call the file.
        keep: Whether the segment that was opened last is kept, for one who reads forward.

    Raises:
        SealedError: It is no sealed file, another one, or cut.
    """

    def __init__(
        self,
        read_at: Callable[[int, int], Buffer],
        stored: int,
        *,
        key: FileKey,
        name: str,
        keep: bool = True,
    ) -> None:
        self._read_at = read_at
        self._name = name
        self._keep = keep
        header = bytes(read_at(0, HEADER_SIZE)) if stored >= HEADER_SIZE else b""
        fixed, self.size, self.count = self._checked(header, key)
        self._cipher = _Cipher(key, header)
        self._fixed = fixed
        self._borders: list[int] = []
        self._base = HEADER_SIZE
        table = 0 if fixed else 4 * self.count + TAG_SIZE
        if stored != HEADER_SIZE + table + self.size + TAG_SIZE * self.count:
            raise self._fault(f"has {stored} bytes, which are not those that its header counts")
        if not fixed:
            self._read_table(table)
        self._kept: tuple[int, bytes] = (-1, b"")

    def _checked(self, header: bytes, key: FileKey) -> tuple[int, int, int]:
        """Segment size, plain size and number of segments that the header states."""
        if header[: len(MAGIC)] != MAGIC:
            raise self._fault("is no sealed file")
        _, major, minor, fixed, size, count, file_id = _HEADER.unpack(header)
        if major != MAJOR:
            raise SealedError(
                self._name,
                f"is a sealed file of version {major}.{minor}, and version {MAJOR}.x is read here",
                remedy="install a newer release of this package",
            )
        if any(header[48:]) or fixed > _LARGEST_SEGMENT or size >= 2**63:
            raise self._fault("has a header that is none")
        if count != (max(1, -(-size // fixed)) if fixed else count) or not count:
            raise self._fault(f"counts {count} segments for {size} bytes")
        if not fixed and count > _MOST_LENGTHS:
            raise self._fault(f"counts {count} segments, and {_MOST_LENGTHS} are read")
        if file_id != key.file_id:
            raise self._fault("is another file than the manifest names, or an older one")
        return fixed, size, count

    def _read_table(self, size: int) -> None:
        try:
            data = self._cipher.open(self._read_at(HEADER_SIZE, size), 0, _TABLE)
        except self._cipher.refused:
            raise self._refusal("the table of segments") from None
        lengths = struct.unpack(f"<{self.count}I", data)
        self._borders = [0, *accumulate(lengths)]
        self._base += size
        if self._borders[-1] != self.size:
            raise self._fault("has segments that don't add up to its size")

    def _refusal(self, part: str) -> SealedError:
        return self._fault(
            f"{part} does not open: it was changed or cut, or comes from another place"
        )

    def _kind(self, number: int) -> int:
        return _LAST if number == self.count - 1 else _SEGMENT

    def _fault(self, reason: str) -> SealedError:
        return SealedError(self._name, reason, remedy="restore the file from a copy")

    def _border(self, number: int) -> int:
        """Where segment ``number`` begins in the plain file; the end for the number after it."""
        if not self._fixed:
            return self._borders[number]
        return min(number * self._fixed, self.size)

    def _number(self, position: int) -> int:
        """The segment that holds a byte of the plain file."""
        if self._fixed:
            return position // self._fixed
        return bisect_right(self._borders, position) - 1

    def place(self, start: int, stop: int) -> tuple[int, int]:
        """Offset and length of the sealed bytes that hold plain bytes ``start`` to ``stop``."""
        first, last = self._number(start), self._number(max(stop - 1, start))
        offset = self._base + self._border(first) + TAG_SIZE * first
        return offset, self._border(last + 1) - self._border(first) + TAG_SIZE * (last + 1 - first)

    def segment(self, number: int) -> bytes:
        """The plain bytes of one segment."""
        kept = self._kept
        if kept[0] == number:
            return kept[1]
        start, stop = self._border(number), self._border(number + 1)
        data = self._read_at(self._base + start + TAG_SIZE * number, stop - start + TAG_SIZE)
        try:
            opened = self._cipher.open(data, number, self._kind(number))
        except self._cipher.refused:
            raise self._refusal(f"segment {number}") from None
        if self._keep:
            self._kept = (number, opened)  # one assignment, so that threads may share the file
        return opened

    def read(self, start: int, stop: int) -> Buffer:
        """Bytes ``start`` to ``stop`` of the plain file."""
        if not 0 <= start <= stop <= self.size:
            raise self._fault(f"ends at byte {self.size}, and {start} to {stop} were asked for")
        if start == stop:
            return b""
        first = self._number(start)
        if stop <= self._border(first + 1):  # the way of a loader, which reads chunk by chunk
            found = self.segment(first)
            if stop - start == len(found):
                return found
            base = self._border(first)
            return memoryview(found)[start - base : stop - base]
        last = self._number(stop - 1)
        result = bytearray(stop - start)
        whole_from = first if start == self._border(first) else first + 1
        whole_to = last + 1 if stop == self._border(last + 1) else last
        begin, end = self._border(whole_from) - start, self._border(whole_to) - start
        if whole_from > first:
            result[:begin] = memoryview(self.segment(first))[-begin:]
        self._open_into(memoryview(result)[begin:end], whole_from, whole_to)
        if whole_to == last:
            result[end:] = memoryview(self.segment(last))[: len(result) - end]
        return result

    def _open_into(self, into: memoryview, first: int, stop: int) -> None:
        """Open whole segments side by side into a place that has their plain size."""
        start = self._base + self._border(first) + TAG_SIZE * first
        sealed = memoryview(self._read_at(start, len(into) + TAG_SIZE * (stop - first)))
        for number in range(first, stop):
            length = self._border(number + 1) - self._border(number)
            try:
                self._cipher.open_into(
                    sealed[: length + TAG_SIZE], number, self._kind(number), into[:length]
                )
            except self._cipher.refused:
                raise self._refusal(f"segment {number}") from None
            sealed, into = sealed[length + TAG_SIZE :], into[length:]

    def blocks(self) -> Iterator[Buffer]:
        """All of the plain file, in blocks of a segment, or of several where these are small."""
        first = 0
        while first < self.count:
            start, stop = self._border(first), first + 1
            while stop < self.count and self._border(stop + 1) - start <= BLOCK_SIZE:
                stop += 1
            if stop == first + 1:
                yield self.segment(first)  # also an empty one, which must open, too
            else:
                yield self.read(start, self._border(stop))
            first = stop

    def check(self) -> None:
        """Open every segment; SealedError names the first that does not."""
        for _ in self.blocks():
            pass


def cut_at(borders: Sequence[int], size: int) -> Cut:
    """Segments that end at each of ``borders``; of one size where these allow it."""
    ends = sorted({0, size, *(border for border in borders if 0 < border < size)})
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not lengths:
        return SEGMENT_SIZE
    first = lengths[0]
    alike = all(length == first for length in lengths[:-1]) and lengths[-1] <= first
    return first if alike else lengths
