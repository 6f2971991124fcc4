"""Which parameters an optimizer leaves undecayed."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["no_weight_decay"]


def no_weight_decay(name: str, shape: Sequence[int]) -> bool:
    """Tell whether weight decay passes a parameter by: biases and norms, as in Megatron.

    >>> no_weight_decay("decoder.final_layernorm.weight", [64])
    True
    >>> no_weight_decay("embedding.word_embeddings.weight", [512, 64])
    False
    """
    return name.endswith(".bias") or len(shape) <= 1
