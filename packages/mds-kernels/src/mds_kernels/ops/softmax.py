"""Softmax of attention scores with scale, padding mask and causal mask, of any length.

Letters: b micro batch, n heads, q query positions, k key positions.
"""

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = ["scaled_masked_softmax", "scaled_masked_softmax_reference"]


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Return the softmax over the last dimension of ``scale * scores``, in fp32 inside.

    Args:
        scores: [b, n, q, k].
        mask: Boolean, True where a key is hidden, broadcastable to ``scores``; or None.
        scale: Factor of the scores.
        causal: Hide the keys after each query; the last query sees all keys, so that fewer
            queries than keys (a cache) come out right.
        backend: The backend to use, or None for the registry's choice.

    Returns:
        [b, n, q, k] in the dtype of ``scores``. A query that sees no key gets zeros, not NaN.
    """
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be boolean, True where a key is hidden; got {mask.dtype}. An additive "
            f"mask is added to the scores before the call."
        )
    run = implementation(
        "scaled_masked_softmax", device=scores.device.type, dtype=scores.dtype, backend=backend
    )
    result: Tensor = run(scores, mask, scale=scale, causal=causal)
    return result


def scaled_masked_softmax_reference(
    scores: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False
) -> Tensor:
    """Return the same in float64: exponentials times visibility over their sum."""
    visible = torch.ones_like(scores, dtype=torch.float64)
    if mask is not None:
        visible = visible * ~mask
    if causal:
        queries, keys = scores.shape[-2:]
        visible = visible.tril(diagonal=keys - queries)
    scaled = scores.double() * scale
    largest = scaled.masked_fill(visible == 0, -torch.inf).amax(dim=-1, keepdim=True)
    shifted = (scaled - largest.clamp(min=-1e300)).masked_fill(visible == 0, 0.0)
    exponentials = shifted.exp() * visible
    total = exponentials.sum(dim=-1, keepdim=True)
    return exponentials / total.where(total > 0, 1.0)
