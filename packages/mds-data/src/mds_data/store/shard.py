"""The codec of 1-D sharded arrays: chunk encoding, shard index, checksums. No files.

A shard is inner chunks in order, then the index (offset and length of each, 16 bytes), then the
index's crc32c. A raw inner chunk is its little-endian elements and their crc32c; a compressed one
is a zstd frame and the frame's crc32c.
"""

from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError
from mds_data.store.array_metadata import CHECKSUM_SIZE, ZSTD_LEVEL, ArrayLayout
from mds_data.store.zstd import compress, decompress

__all__ = [
    "ABSENT",
    "checksum",
    "decode_chunk",
    "decode_index",
    "encode_chunk",
    "encode_index",
    "lies_in_order",
]

ABSENT = 2**64 - 1
"""Offset and length of an inner chunk that lies wholly past the array's end."""


def checksum(data: bytes | NDArray[Any]) -> int:
    """The crc32c of bytes or of a contiguous array."""
    return int(google_crc32c.value(data))


def encode_chunk(values: NDArray[Any], *, layout: ArrayLayout) -> bytes:
    """The bytes of one inner chunk; ``values`` may be shorter than a chunk and is padded with 0."""
    if len(values) < layout.chunk:
        values = np.concatenate([values, np.zeros(layout.chunk - len(values), layout.dtype)])
    data = np.ascontiguousarray(values, dtype=layout.dtype).tobytes()
    if layout.compressed:
        data = compress(data, level=ZSTD_LEVEL)
    return data + checksum(data).to_bytes(CHECKSUM_SIZE, "little")


def decode_chunk(
    data: NDArray[np.uint8], *, layout: ArrayLayout, name: str, authentic: bool = False
) -> NDArray[Any]:
    """The elements of one inner chunk after its checksum was compared.

    Args:
        data: [bytes of the chunk], its checksum included.
        layout: The array's layout.
        name: How messages call the chunk.
        authentic: Whether the bytes were deciphered, and so were compared already.
    """
    payload = data[:-CHECKSUM_SIZE]
    if len(data) <= CHECKSUM_SIZE or not (authentic or _matches(payload, data)):
        raise DamagedError(f"{name}: the checksum differs; restore the file from a copy")
    if not layout.compressed:
        if len(data) != layout.chunk_size:
            raise DamagedError(f"{name}: has {len(data)} bytes, not {layout.chunk_size}")
        return payload.view(layout.dtype)
    expected = layout.chunk * layout.dtype.itemsize
    return np.frombuffer(decompress(payload, expected, name=name), layout.dtype)


def _matches(payload: NDArray[np.uint8], data: NDArray[np.uint8]) -> bool:
    return checksum(payload) == int.from_bytes(data[-CHECKSUM_SIZE:].tobytes(), "little")


def encode_index(entries: NDArray[np.uint64]) -> bytes:
    """The bytes of a shard's index with its checksum; ``entries`` is [chunks, 2]."""
    data = entries.astype("<u8").tobytes()
    return data + checksum(data).to_bytes(CHECKSUM_SIZE, "little")


def decode_index(
    data: bytes, *, layout: ArrayLayout, file_size: int, used: int, name: str
) -> NDArray[np.uint64]:
    """Check a shard's index and return it.

    Args:
        data: The last ``layout.index_size`` bytes of the shard.
        layout: The array's layout.
        file_size: Bytes of the shard.
        used: Inner chunks of this shard that lie inside the array.
        name: How messages call the shard.

    Returns:
        [chunks, 2] offset and length of each chunk; the first ``used`` ones are present, in order
        and inside the file.
    """
    if len(data) != layout.index_size:
        raise DamagedError(f"{name}: is too short to hold a shard index; it was cut")
    if checksum(data[:-CHECKSUM_SIZE]) != int.from_bytes(data[-CHECKSUM_SIZE:], "little"):
        raise DamagedError(
            f"{name}: the checksum of the shard index differs; the file was cut or changed, "
            f"restore it from a copy"
        )
    entries = np.frombuffer(data, "<u8", count=2 * layout.chunks_per_shard).reshape(-1, 2)
    inside = entries[:used]
    if (inside == ABSENT).any():
        missing = int(np.flatnonzero((inside == ABSENT).any(axis=1))[0])
        raise DamagedError(f"{name}: chunk {missing} is missing")
    limit = file_size - layout.index_size
    too_long = inside > np.uint64(max(limit, 0))
    if too_long.any() or (inside.sum(axis=1) > limit).any():
        raise DamagedError(f"{name}: the shard index points outside the file")
    if used and (inside[1:, 0] < inside[:-1].sum(axis=1)).any():
        raise DamagedError(f"{name}: the chunks of the shard overlap or are out of order")
    return entries


def lies_in_order(entries: NDArray[np.uint64], *, layout: ArrayLayout, used: int) -> bool:
    """Whether chunk ``k`` lies at ``k * chunk_size``, as the hot layout promises."""
    offsets = np.arange(used, dtype=np.uint64) * np.uint64(layout.chunk_size)
    lengths_fit = bool((entries[:used, 1] == layout.chunk_size).all())
    return not layout.compressed and lengths_fit and bool((entries[:used, 0] == offsets).all())
