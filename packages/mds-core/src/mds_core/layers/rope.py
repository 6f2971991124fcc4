"""Rotary position embedding, rotating the two halves of the channels against each other.

Shapes: ``b`` micro batch, ``n`` heads, ``s`` sequence, ``d`` head dim, ``r`` rotating channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Rotation", "apply_rope", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [b or 1, 1, s, r / 2], in fp32 (float64 for float64 models)."""


def rotation(position_ids: Tensor, *, channels: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return the angles' cosines and sines at each position.

    They are computed anew for each forward pass: a cache would have to know every device and dtype
    that asks, and the cost is that of one head.

    Args:
        position_ids: [b or 1, s] int64.
        channels: Rotating channels of a head, an even number.
        theta: Base of the geometric series of wave lengths.
        dtype: Of the model; angles are fp32 for it, or float64.
    """
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    exponents = torch.arange(0, channels, 2, device=position_ids.device, dtype=precision)
    frequencies = theta ** (-exponents / channels)
    angles = position_ids[:, None, :, None].to(precision) * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head by its position's angles.

    Args:
        x: [b, n, s, d] queries or keys.
        cos: [b or 1, 1, s, r / 2].
        sin: As ``cos``.

    Returns:
        [b, n, s, d], in the dtype of ``x``; channels from r on stay as they are.
    """
    half = cos.size(-1)
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat([part.to(x.dtype) for part in rotated] + [x[..., 2 * half :]], dim=-1)
