"""Random numbers that a router draws in training, with DeepSpeed's rules.

Like dropout masks they are pure functions of seed, sample, layer and position, so the choice of
experts does not depend on how ranks share out samples and positions, and recomputation repeats it.

Shapes: ``b`` micro batch, ``s`` positions of this rank, ``e`` experts, ``h`` hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mds_core.philox import key_of, philox, splitmix
from mds_core.rng import DropoutKey

__all__ = ["NoisePlace", "gumbel", "jittered", "lots"]

_BITS = 53  # of a float64's fraction
_JITTER = 1e-2


class NoisePlace(NamedTuple):
    """Which numbers to draw."""

    key: DropoutKey
    layer: int
    """Global number of the layer."""
    rows: tuple[range, ...]
    """Positions of this rank, in its order."""


def gumbel(place: NoisePlace, *, experts: int) -> Tensor:
    """Standard Gumbel numbers [b, s, e], float64.

    The largest of scores plus these is a draw from the scores' softmax.
    """
    return -torch.log(-torch.log(_uniform(place, stream="gumbel", columns=experts)))


def lots(place: NoisePlace, experts: Tensor, *, count: int) -> Tensor:
    """Numbers between 0 and 1 for choices [b, s, k] of ``count`` experts, float64."""
    return _uniform(place, stream="lots", columns=count).gather(-1, experts)


def jittered(x: Tensor, place: NoisePlace) -> Tensor:
    """Multiply [b, s, h] by numbers that are at most one percent from 1."""
    drawn = _uniform(place, stream="jitter", columns=x.size(-1))
    return x * (1.0 + _JITTER * (2.0 * drawn - 1.0)).to(x.dtype)


def _uniform(place: NoisePlace, *, stream: str, columns: int) -> Tensor:
    """Numbers [b, s, columns] between 0 and 1, never at an end."""
    samples = place.key.samples
    device = samples.device
    sample = samples.view(-1, 1, 1)
    rows = [torch.arange(each.start, each.stop, device=device) for each in place.rows]
    zero = torch.zeros(1, 1, 1, dtype=torch.int64, device=device)
    counter = (zero, torch.cat(rows).view(1, -1, 1), sample >> 32, sample & 0xFFFFFFFF)
    words = philox(key_of("router", place.key.seed, place.layer, stream), counter)
    bits = splitmix(words[0] | (words[1] << 32), torch.arange(columns, device=device))
    return (((bits >> (64 - _BITS)) & ((1 << _BITS) - 1)).double() + 0.5) * 2.0**-_BITS
