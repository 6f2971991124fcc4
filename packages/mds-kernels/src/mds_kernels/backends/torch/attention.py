"""Attention by torch's scaled_dot_product_attention, which picks a kernel of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, causal: bool, scale: float
) -> Tensor:
    """Return [b, n, q, d]; a query that sees no key gets zeros."""
    queries, keys = query.shape[-2], key.shape[-2]
    grouped = query.shape[1] != key.shape[1]
    if mask is None and (not causal or queries == keys):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if causal:
        # torch's own flag hides by position from the start; here the last query sees all keys.
        later = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        later = later.triu(diagonal=keys - queries + 1)
        mask = later if mask is None else mask | later
    assert mask is not None
    # A blind query is let see everything and then zeroed: 0 / 0 would spoil the gradients.
    blind = mask.all(dim=-1, keepdim=True)
    result = F.scaled_dot_product_attention(
        query, key, value, attn_mask=~mask | blind, scale=scale, enable_gqa=grouped
    )
    return result.masked_fill(blind, 0.0)
