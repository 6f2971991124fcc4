"""What Megatron-core's stored keys are: canonical names, and which leading dimensions are counts.

A key without a layer's number is of all layers, stacked along its first dimension. Experts are
stacked likewise, behind the layers. Some versions store every expert and every layer by itself, and
then a gated MLP in two halves, ``_w`` for the gate and ``_v`` for the values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mds_ckpt.megatron.naming import block_name, canonical_name

__all__ = ["Key", "key_of"]

_BLOCK = re.compile(r"(encoder|decoder)\.layers\.(?:(\d{1,6})\.)?(.+)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(\d{1,6})\.)?(linear_fc[12]\.(?:weight|bias))")
_HALF = re.compile(r"(.*\blinear_fc1\.(?:weight|bias))_([wv])")
_OUTSIDE = ("lm_head.layer_norm.weight", "lm_head.layer_norm.bias", "output_layer.bias")
"""Parameters of a BERT that Megatron-core calls as we do."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a stored tensor holds."""

    name: str
    """Canonical name, with ``{layer}`` or ``{expert}`` where a dimension counts them."""
    half: int | None = None
    """0 for the gate's rows of a gated MLP, 1 for the values', None for all rows."""

    @property
    def has_layers(self) -> bool:
        """Whether the first dimension is the layer."""
        return "{layer}" in self.name

    @property
    def has_experts(self) -> bool:
        """Whether the next dimension is the expert."""
        return "{expert}" in self.name


def key_of(stored: str) -> Key | None:
    """What a stored key means; None if it is not Megatron's."""
    if stored in _OUTSIDE:
        return Key(stored)
    block = _BLOCK.fullmatch(stored)
    if block is None:
        stack = "encoder" if stored.startswith("encoder.") else "decoder"
        named = canonical_name(stored, stack=stack)
        return None if named is None else Key(named.name)
    rest, half = block[3], None
    if (cut := _HALF.fullmatch(rest)) is not None:
        rest, half = cut[1], "wv".index(cut[2])
    if (expert := _EXPERT.fullmatch(rest)) is not None:
        inner: str | None = f"mlp.experts.local_experts.{expert[1] or '{expert}'}.{expert[2]}"
    else:
        found = block_name(rest)
        inner = None if found is None else found.name
    place = f"{block[1]}.layers.{block[2] or '{layer}'}"
    return None if inner is None else Key(f"{place}.{inner}", half)
