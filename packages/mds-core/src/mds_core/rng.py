"""Dropout masks that do not depend on the layout.

A mask is a pure function of (seed, sample, layer, site, head or hidden index, position), so a rank
computes its slice alone and recomputation needs no generator state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mds_core.philox import key_of, philox, splitmix

__all__ = ["DropoutKey", "Site", "dropout", "keep_mask"]

Site = Literal[
    "embedding",
    "attention",
    "attention_output",
    "cross_attention",
    "cross_attention_output",
    "mlp_output",
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
]

_LANES = 4  # 16-bit numbers in 64 bits, one for each value
_STEPS = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DropoutKey:
    """What makes the dropout of one micro batch its own.

    Attributes:
        seed: The run's seed.
        samples: [b] int64, the number of each sample in the run's order (consumed samples).
    """

    seed: int
    samples: Tensor


def keep_mask(
    key: DropoutKey,
    *,
    layer: int,
    site: Site,
    probability: float,
    heads: range,
    rows: range,
    columns: range,
) -> Tensor:
    """Return which values stay.

    Args:
        key: Seed and samples.
        layer: Global number of the layer.
        site: Place in the layer.
        probability: Share of values to drop, rounded to 1/65536.
        heads: Global head indices; ``range(1)`` where there are no heads.
        rows: Positions (of the queries).
        columns: Hidden indices, or positions of the keys.

    Returns:
        [b, heads, rows, columns] bool.
    """
    samples = key.samples
    device = samples.device

    def axis(values: range, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(values)
        steps = torch.arange(values.start, values.stop, values.step, device=device)
        return steps.view(shape)

    if not (heads and rows and columns):
        shape = (len(samples), len(heads), len(rows), len(columns))
        return torch.ones(shape, dtype=torch.bool, device=device)
    blocks = range(columns.start // _LANES, -(-columns.stop // _LANES))
    sample = samples.view(-1, 1, 1, 1)
    counter = (axis(heads, 1), axis(rows, 2), sample >> 32, sample & 0xFFFFFFFF)
    words = philox(key_of("dropout", key.seed, layer, site), counter)
    # One Philox stream seeds each row; along it the cheaper generator suffices.
    bits = splitmix(words[0] | (words[1] << 32), axis(blocks, 3))
    lanes = bits.view(torch.int16)  # [b, heads, rows, 4 * blocks], uniform from -32768 on
    mask = lanes >= round(probability * _STEPS) - _STEPS // 2
    return mask.narrow(-1, columns.start - blocks.start * _LANES, len(columns))


def dropout(x: Tensor, keep: Tensor, *, probability: float) -> Tensor:
    """Zero what ``keep`` does not name and scale the rest, so that the expectation stays.

    Args:
        x: Values.
        keep: bool, of a shape that broadcasts to that of ``x``.
        probability: The probability that ``keep`` was drawn with.

    Returns:
        As ``x``.
    """
    scale = _STEPS / (_STEPS - round(probability * _STEPS))
    return x * keep.to(x.dtype).mul_(scale)
