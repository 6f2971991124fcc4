"""Zstandard frames of known content: one chunk each, with contexts that are used again.

A context takes as long to make as a small chunk to decompress, and no two threads may share one.
"""

import threading
from functools import cache

import numpy as np
import zstandard
from numpy.typing import NDArray

from mds_data.errors import DamagedError

__all__ = ["compress", "decompress"]


class _Contexts(threading.local):
    """The contexts of one thread."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}


@cache
def _contexts() -> _Contexts:
    return _Contexts()


def compress(data: bytes, *, level: int) -> bytes:
    """One frame that declares its content's size."""
    compressors = _contexts().compressors
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressors[level].compress(data)


def decompress(frame: NDArray[np.uint8], expected: int, *, name: str) -> bytes:
    """Decompress into exactly ``expected`` bytes, so that a bomb can't grow.

    Args:
        frame: [bytes of the frame], contiguous.
        expected: Bytes of its content.
        name: How messages call the chunk.
    """
    try:
        data = frame.data
        declared = zstandard.frame_content_size(data)
        if declared not in (expected, -1):  # -1: not declared, then the limit below holds
            raise DamagedError(f"{name}: declares {declared} bytes of content, not {expected}")
        content = _contexts().decompressor.decompress(
            data, max_output_size=expected, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise DamagedError(f"{name}: can't be decompressed ({error})") from None
    if len(content) != expected:
        raise DamagedError(f"{name}: holds {len(content)} bytes of content, not {expected}")
    return content
