"""crc32c of tensors' bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import google_crc32c

if TYPE_CHECKING:
    import numpy as np


def crc32c(data: bytes | np.ndarray[Any, np.dtype[np.uint8]], *, crc: int = 0) -> int:
    """The checksum of ``data``, continuing from ``crc``.

    Args:
        data: Bytes, or a contiguous array of them (a memoryview is refused by the C code).
        crc: The checksum of what came before.
    """
    found: int = google_crc32c.extend(crc, data)
    return found


def as_hex(crc: int) -> str:
    """The 8 digits that stand in a manifest."""
    return f"{crc:08x}"
