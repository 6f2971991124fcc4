"""Rotation of all heads of queries and keys at one position: one program a position.

Letters: n heads, d head dim, r rotated channels; a position has two leading indices, outer, inner.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, D103
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _turn_heads(
    x_ptr,
    y_ptr,
    stride_head,
    heads,
    dim,
    half,
    cos,
    sin,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    angle = tl.arange(0, HALF)
    if INTERLEAVED:
        first, second = 2 * angle, 2 * angle + 1
    else:
        first, second = angle, angle + half
    rest = 2 * half + tl.arange(0, REST)
    for start in range(0, heads, HEADS):
        head = start + tl.arange(0, HEADS)
        there = (head < heads)[:, None]
        source = x_ptr + head[:, None] * stride_head
        target = y_ptr + head[:, None] * dim
        inside = there & (angle < half)[None, :]
        one = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
        two = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
        kind = y_ptr.dtype.element_ty
        tl.store(target + first[None, :], (one * cos - two * sin).to(kind), mask=inside)
        tl.store(target + second[None, :], (two * cos + one * sin).to(kind), mask=inside)
        beyond = there & (rest < dim)[None, :]
        copied = tl.load(source + rest[None, :], mask=beyond, other=0.0)
        tl.store(target + rest[None, :], copied, mask=beyond)


@triton.jit
def rope(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    turned_query_ptr,
    turned_key_ptr,
    inner_size,
    query_outer,
    query_inner,
    query_head,
    key_outer,
    key_inner,
    key_head,
    angle_outer,
    angle_inner,
    query_heads,
    key_heads,
    dim,
    half,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64)
    outer, inner = position // inner_size, position % inner_size
    angle = tl.arange(0, HALF)
    place = outer * angle_outer + inner * angle_inner + angle
    cos = tl.load(cos_ptr + place, mask=angle < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + place, mask=angle < half, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    _turn_heads(
        query_ptr + outer * query_outer + inner * query_inner,
        turned_query_ptr + position * query_heads * dim,
        query_head,
        query_heads,
        dim,
        half,
        cos,
        sin,
        INTERLEAVED,
        HEADS,
        HALF,
        REST,
    )
    _turn_heads(
        key_ptr + outer * key_outer + inner * key_inner,
        turned_key_ptr + position * key_heads * dim,
        key_head,
        key_heads,
        dim,
        half,
        cos,
        sin,
        INTERLEAVED,
        HEADS,
        HALF,
        REST,
    )
