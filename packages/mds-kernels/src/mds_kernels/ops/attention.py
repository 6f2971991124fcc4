"""Scaled dot-product attention, by torch's own kernels or flash-attn.

Letters: b micro batch, n heads, q query positions, k key positions, d head dim.
"""

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation
from mds_kernels.ops.softmax import scaled_masked_softmax_reference

__all__ = ["attention", "attention_reference"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return the mean of the values weighted by ``softmax(scale * query @ key.T)``.

    Args:
        query: [b, n, q, d].
        key: [b, n_kv, k, d] with n a multiple of n_kv.
        value: [b, n_kv, k, d].
        mask: Boolean, True where a key is hidden, broadcastable to [b, n, q, k]; or None.
        causal: Hide the keys after each query; the last query sees all keys, so that fewer
            queries than keys (a cache) come out right.
        scale: None for ``1 / sqrt(d)``.
        backend: The backend to use, or None for the registry's choice.

    Returns:
        [b, n, q, d]. A query that sees no key gets zeros, not NaN.
    """
    _check(query, key, value, mask)
    run = implementation("attention", device=query.device.type, dtype=query.dtype, backend=backend)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = run(query, key, value, mask, causal=causal, scale=scale)
    return result


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the same in float64, with whole scores."""
    groups = query.shape[1] // key.shape[1]
    keys = key.double().repeat_interleave(groups, dim=1)
    values = value.double().repeat_interleave(groups, dim=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.double() @ keys.transpose(-1, -2)
    return scaled_masked_softmax_reference(scores, mask, scale=scale, causal=causal) @ values


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    if query.dim() != 4 or key.shape != value.shape or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query must be [b, n, q, d] and key and value [b, n_kv, k, d] with n a multiple of "
            f"n_kv; got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean, True where a key is hidden; got {mask.dtype}.")
