"""Attention by flash-attn, where it is installed: CUDA, 16 bits, no mask but the causal one."""

import importlib.util
from collections.abc import Mapping
from importlib import import_module

from torch import Tensor


def why_not(_device: str, _environment: Mapping[str, str]) -> str | None:
    """Return why flash-attn can't be used on this machine, or None."""
    if importlib.util.find_spec("flash_attn") is None:
        return "no flash-attn is installed"
    return None


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
) -> Tensor:
    """Return [b, n, q, d]."""
    if mask is not None:
        raise ValueError(
            "attention: flash-attn takes no mask but the causal one; leave the backend to auto, "
            "or give sequences without padding."
        )
    module = import_module("flash_attn")
    # Its layout is [b, s, n, d]; its causal mask is aligned to the last key, as ours is.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    result: Tensor = module.flash_attn_func(q, k, v, causal=causal, softmax_scale=scale)
    return result.transpose(1, 2)
