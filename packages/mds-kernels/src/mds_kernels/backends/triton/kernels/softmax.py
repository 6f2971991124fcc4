"""Masked softmax of one query's scores in blocks of keys, so that no length is too large.

Letters: b micro batch, n heads, q query positions, k key positions.
"""
# ruff: noqa: ANN001, ANN201, N803, D103
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def softmax_forward(
    scores_ptr,
    mask_ptr,
    result_ptr,
    heads,
    queries,
    keys,
    mask_batch,
    mask_head,
    mask_query,
    mask_key,
    scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    head = row // queries % heads
    batch = row // queries // heads
    scores = scores_ptr + row * keys
    result = result_ptr + row * keys
    mask = mask_ptr + batch * mask_batch + head * mask_head + query * mask_query
    visible_keys = keys
    if CAUSAL:
        visible_keys = tl.minimum(keys, tl.maximum(query + keys - queries + 1, 0)).to(tl.int32)
    # A floor that is a number: with an infinity, blocks without a visible key would give NaN.
    largest = -3.0e38
    total = 0.0
    for start in range(0, visible_keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        visible = key < visible_keys
        if MASKED:
            hidden = tl.load(mask + key.to(tl.int64) * mask_key, mask=visible, other=1)
            visible = visible & (hidden == 0)
        score = tl.load(scores + key, mask=visible, other=0.0).to(tl.float32) * scale
        higher = tl.maximum(largest, tl.max(tl.where(visible, score, -3.0e38), 0))
        parts = tl.where(visible, tl.exp(tl.where(visible, score - higher, 0.0)), 0.0)
        total = total * tl.exp(largest - higher) + tl.sum(parts, 0)
        largest = higher
    # A query that sees nothing has no share to give, so any finite factor will do.
    inverse = 1.0 / tl.where(total > 0.0, total, 1.0)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        inside = key < keys
        visible = key < visible_keys
        if MASKED:
            hidden = tl.load(mask + key.to(tl.int64) * mask_key, mask=visible, other=1)
            visible = visible & (hidden == 0)
        score = tl.load(scores + key, mask=visible, other=0.0).to(tl.float32) * scale
        share = tl.exp(tl.where(visible, score - largest, 0.0)) * inverse
        share = tl.where(visible, share, 0.0)
        tl.store(result + key, share.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward(grad_ptr, result_ptr, grad_scores_ptr, keys, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * keys
    inner = 0.0
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        gradient = tl.load(grad_ptr + row + key, mask=key < keys, other=0.0).to(tl.float32)
        share = tl.load(result_ptr + row + key, mask=key < keys, other=0.0).to(tl.float32)
        inner += tl.sum(gradient * share, 0)
    for start in range(0, keys, BLOCK):
        key = start + tl.arange(0, BLOCK)
        gradient = tl.load(grad_ptr + row + key, mask=key < keys, other=0.0).to(tl.float32)
        share = tl.load(result_ptr + row + key, mask=key < keys, other=0.0).to(tl.float32)
        grad_score = (gradient - inner) * share * scale
        place = grad_scores_ptr + row + key
        tl.store(place, grad_score.to(grad_scores_ptr.dtype.element_ty), mask=key < keys)
