"""One token's logits: their largest, the sum of their exponentials, and their gradient.

Letters: c tokens of a chunk, r vocabulary rows of this rank.
"""
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def statistics(
    logits_ptr,
    labels_ptr,
    out_ptr,
    tokens,
    stride,
    rows,
    vocab_start,
    WANT_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the largest logit, the sum of exponentials, the label's logit and the sum of logits.

    All but the first are relative to the largest; the label's is zero where it is not here.
    """
    token = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + token * stride
    largest = -3.0e38
    total = 0.0
    # Relative to the first logit: a sum of values far from zero would lose what makes them differ.
    pivot = tl.load(logits).to(tl.float32)
    above = 0.0
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        logit = tl.load(logits + row, mask=inside, other=0.0).to(tl.float32)
        logit = tl.where(inside, logit, -3.0e38)
        higher = tl.maximum(largest, tl.max(logit, 0))
        parts = tl.where(inside, tl.exp(logit - higher), 0.0)
        total = total * tl.exp(largest - higher) + tl.sum(parts, 0)
        largest = higher
        if WANT_SUM:
            above += tl.sum(tl.where(inside, logit - pivot, 0.0), 0)
    wanted = tl.load(labels_ptr + token) - vocab_start
    here = (wanted >= 0) & (wanted < rows)
    label = tl.load(logits + wanted, mask=here, other=0.0).to(tl.float32) - largest
    tl.store(out_ptr + token, largest)
    tl.store(out_ptr + tokens + token, total)
    tl.store(out_ptr + 2 * tokens + token, tl.where(here, label, 0.0))
    if WANT_SUM:
        tl.store(out_ptr + 3 * tokens + token, above + rows * (pivot - largest))


@triton.jit
def gradient(
    logits_ptr,
    labels_ptr,
    maxima_ptr,
    factor_ptr,
    share_ptr,
    push_ptr,
    out_ptr,
    stride,
    out_stride,
    rows,
    vocab_start,
    BLOCK: tl.constexpr,
):
    """Write ``exp(logit - largest) * factor - share``, plus ``push`` at the label."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    logit = tl.load(logits_ptr + token * stride + row, mask=inside, other=0.0).to(tl.float32)
    relative = tl.where(inside, logit - tl.load(maxima_ptr + token), 0.0)
    value = tl.exp(relative) * tl.load(factor_ptr + token)
    value -= tl.load(share_ptr + token)
    wanted = tl.load(labels_ptr + token) - vocab_start
    value += tl.where(row == wanted, tl.load(push_ptr + token), 0.0)
    place = out_ptr + token * out_stride + row
    tl.store(place, value.to(out_ptr.dtype.element_ty), mask=inside)
