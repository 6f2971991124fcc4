"""Where documents lie among the tokens, checked before anyone trusts it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DamagedError

__all__ = ["checked_bounds"]


def checked_bounds(
    start: NDArray[Any], length: NDArray[Any], *, length_of_tokens: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and length of each document after a check that they are in order and inside."""
    start, length = (each.astype(np.int64, copy=False) for each in (start, length))
    if not len(start):
        return start, length
    fault = (start < 0) | (length < 0) | (length > length_of_tokens - start)
    fault[1:] |= start[1:] < start[:-1] + length[:-1]
    if fault.any():
        number = int(np.flatnonzero(fault)[0])
        raise DamagedError(
            f"{name}: document {number} starts at {start[number]} with {length[number]} tokens, "
            f"which overlaps its neighbour or leaves the {length_of_tokens} tokens; restore "
            f"doc_start and doc_length from a copy"
        )
    return start, length
