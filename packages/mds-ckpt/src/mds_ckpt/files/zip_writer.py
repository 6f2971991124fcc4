"""Write a zip file the way torch does: members stored, data aligned, sizes behind the data."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Protocol

__all__ = ["Output", "ZipWriter"]

_ALIGNMENT = 64
_SMALL = 1 << 16
"""Bytes up to which parts wait, to be written together with those behind them."""


class Output(Protocol):
    """Where the bytes go, in order."""

    def write(self, data: bytes | memoryview) -> object:
        """Append ``data``."""


class ZipWriter:
    """Stored members with aligned data, sizes and checksums behind them, and a zip64 directory."""

    def __init__(self, stream: Output, *, root: str) -> None:
        self._stream = stream
        self._root = root
        self._at = 0
        self._waiting = bytearray()
        self._entries: list[tuple[bytes, int, int, int]] = []

    def _write(self, data: bytes | memoryview) -> None:
        self._at += len(data)
        if len(self._waiting) + len(data) > _SMALL:
            self._flush()
        if len(data) > _SMALL:
            self._stream.write(data)
        else:
            self._waiting += data

    def _flush(self) -> None:
        if self._waiting:
            self._stream.write(bytes(self._waiting))
            self._waiting.clear()

    def add(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        """Write one member, its content in blocks."""
        raw = f"{self._root}/{name}".encode()
        at = self._at
        padding = -(at + 30 + len(raw) + 4) % _ALIGNMENT
        extra = struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        header = struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", 0, 0x0808, 0, 0, 0, 0, 0, 0, len(raw), len(extra)
        )
        self._write(header + raw + extra)
        crc = count = 0
        for block in blocks:
            self._write(block)
            crc, count = zlib.crc32(block, crc), count + len(block)
        is_wide = count >= 0xFFFFFFFF
        self._write(struct.pack("<4sI2Q" if is_wide else "<4s3I", b"PK\x07\x08", crc, count, count))
        self._entries.append((raw, at, count, crc))

    def close(self) -> None:
        """Write the directory; the stream stays open."""
        start = self._at
        self._write(b"".join(_central_entry(*entry) for entry in self._entries))
        end = self._at
        number, length = len(self._entries), end - start
        self._write(
            struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 0, 45, 0, 0, number, number, length, start)
            + struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
            + struct.pack(
                "<4s4H2IH",
                b"PK\x05\x06",
                0,
                0,
                min(number, 0xFFFF),
                min(number, 0xFFFF),
                min(length, 0xFFFFFFFF),
                min(start, 0xFFFFFFFF),
                0,
            )
        )
        self._flush()


def _central_entry(raw: bytes, at: int, count: int, crc: int) -> bytes:
    mask = 0xFFFFFFFF
    wide = [value for value in (count, count, at) if value >= mask]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    small, offset = min(count, mask), min(at, mask)
    fields = (b"PK\x01\x02", 0, 0, 0x0808, 0, 0, 0, crc, small, small, len(raw), len(extra))
    return struct.pack("<4s6H3I5H2I", *fields, 0, 0, 0, 0, offset) + raw + extra
