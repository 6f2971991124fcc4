"""Rotary position embedding, rotating the two halves of the channels against each other.

Shapes: ``b`` micro batch, ``n`` heads, ``s`` sequence, ``d`` head dim, ``r`` rotating channels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mds_core.config import GPTConfig
from mds_core.rope_scaling import RopeScaling, sharpness

__all__ = ["Rotation", "apply_rope", "rotation"]

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, each [b or 1, 1, s, r / 2], in fp32 (float64 for float64 models)."""


def rotation(position_ids: Tensor, *, config: GPTConfig, dtype: torch.dtype) -> Rotation:
    """Return the angles' cosines and sines at each position.

    They are computed anew for each forward pass: a cache would have to know every device and dtype
    that asks, and the cost is that of one head.

    Args:
        position_ids: [b or 1, s] int64.
        config: Shape of the model; its rotating channels, base and scaling count.
        dtype: Of the model; angles are fp32 for it, or float64.
    """
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    positions = position_ids.to(precision)
    theta: float | Tensor = config.rope_theta
    scaling, channels = config.rope_scaling, config.rope_channels
    if scaling is not None and scaling.rope_type == "dynamic":
        theta = _enlarged_base(positions, config=config, factor=scaling.factor)
    exponents = torch.arange(0, channels, 2, device=positions.device, dtype=precision)
    frequencies = theta ** (-exponents / channels)  # [r / 2]
    amplitude = 1.0
    if scaling is not None:
        frequencies = _stretched(frequencies, scaling=scaling, config=config)
        amplitude = _amplitude(scaling)
    angles = positions[:, None, :, None] * frequencies
    return angles.cos() * amplitude, angles.sin() * amplitude


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


def _enlarged_base(positions: Tensor, *, config: GPTConfig, factor: float) -> Tensor:
    """NTK-aware base: beyond the trained length it grows so that the longest wave still fits."""
    trained, channels = config.max_position_embeddings, config.rope_channels
    length = (positions.max() + 1).clamp(min=trained)
    growth = factor * length / trained - (factor - 1)
    return config.rope_theta * growth ** (channels / (channels - 2))


def _stretched(frequencies: Tensor, *, scaling: RopeScaling, config: GPTConfig) -> Tensor:
    """Slow down those of the [r / 2] frequencies that the scaling names."""
    if scaling.rope_type == "dynamic":
        return frequencies  # the base has done it
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    original = scaling.original_max_position_embeddings or config.max_position_embeddings
    if scaling.rope_type == "llama3":
        kept = _kept_by_llama3(frequencies, scaling=scaling, original=original)
    else:
        kept = _kept_by_yarn(frequencies, scaling=scaling, original=original, config=config)
    return frequencies / scaling.factor * (1.0 - kept) + frequencies * kept


def _kept_by_llama3(frequencies: Tensor, *, scaling: RopeScaling, original: int) -> Tensor:
    """Share of each frequency that stays: all of the fast, none of the slow ones."""
    low, high = scaling.low_freq_factor or 1.0, scaling.high_freq_factor or 4.0
    turns = original * frequencies / (2.0 * math.pi)
    return ((turns - low) / (high - low)).clamp(0.0, 1.0)


def _kept_by_yarn(
    frequencies: Tensor, *, scaling: RopeScaling, original: int, config: GPTConfig
) -> Tensor:
    """Share of each frequency that stays, falling linearly over the channels (YaRN, eq. 23)."""
    channels = config.rope_channels

    def channel(turns: float) -> float:
        """Pair of channels whose wave turns so often in the original length."""
        waves = math.log(original / (turns * 2.0 * math.pi))
        return channels * waves / (2.0 * math.log(config.rope_theta))

    first, last = channel(scaling.beta_fast or 32.0), channel(scaling.beta_slow or 1.0)
    first, last = max(math.floor(first), 0), min(math.ceil(last), channels - 1)
    pairs = torch.arange(len(frequencies), device=frequencies.device, dtype=frequencies.dtype)
    width = last - first or 0.001  # a step rather than a division by zero
    return 1.0 - ((pairs - first) / width).clamp(0.0, 1.0)


def _amplitude(scaling: RopeScaling) -> float:
    """Factor of cosines and sines; YaRN sharpens attention over longer sequences with it."""
    if scaling.rope_type != "yarn":
        return 1.0
    return scaling.attention_factor or sharpness(scaling.factor)
