"""ALiBi: instead of position vectors, scores fall linearly with the distance of query and key.

Shapes: ``b`` micro batch, ``n`` query heads, ``q`` and ``k`` positions of queries and keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["alibi_mask", "alibi_slopes"]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Slope of each of a model's heads.

    For a power of two they are a geometric series from 2 ** (-8 / n) down to 2 ** -8. Other numbers
    take those of the next lower power and then every other one of the next higher.

    >>> alibi_slopes(4)
    (0.25, 0.0625, 0.015625, 0.00390625)
    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    lower = 2 ** math.floor(math.log2(num_heads))
    series = [2.0 ** (-8.0 * i / lower) for i in range(1, lower + 1)]
    between = [2.0 ** (-4.0 * i / lower) for i in range(1, 2 * (num_heads - lower), 2)]
    return (*series, *between)


def alibi_mask(
    queries: int,
    *,
    slopes: tuple[float, ...],
    visible: Tensor | None = None,
    offset: int = 0,
    places: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """What is added to the scores, -inf where a key is not seen.

    Args:
        queries: Number of query positions; keys are the ``offset`` positions before them and they.
        slopes: Of the n heads.
        visible: [b or 1, 1, q, k] bool, which keys a query sees; all up to its own if None.
        offset: Keys that a cache already holds.
        places: [b, q] positions of the queries where the sequences' lengths differ.
        dtype: Of the result.
        device: Of the result.

    Returns:
        [b or 1, n, q, k].
    """
    if places is None:
        places = torch.arange(offset, offset + queries, device=device)[None]
    row = places[:, None, :, None]
    column = torch.arange(offset + queries, device=device)
    visible = column <= row if visible is None else visible
    slope = torch.tensor(slopes, dtype=dtype, device=device)[None, :, None, None]
    return (slope * (column - row)).masked_fill(~visible, -math.inf)
