"""Masked softmax of attention scores in one launch each way, of any length.

Letters: b micro batch, n heads, q query positions, k key positions.
"""

from torch import Tensor

from mds_kernels.backends.fused.softmax import scaled_masked_softmax as with_gradient


def scaled_masked_softmax(
    scores: Tensor, mask: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    """Return the softmax of ``scale * scores`` [b, n, q, k] over the visible keys."""
    return with_gradient(scores, mask, scale=scale, causal=causal, kernels="cuda")
