"""Rows to experts and back: one program a row and block of channels, reads only, no atomics.

Letters: n tokens, k experts a token (choices), h hidden (columns).
"""
# ruff: noqa: ANN001, ANN201, N803, D103
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def spread(
    x_ptr,
    order_ptr,
    probabilities_ptr,
    rows_ptr,
    columns,
    choices,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    slot = tl.load(order_ptr + row)
    values = tl.load(x_ptr + slot // choices * columns + column, mask=inside, other=0.0)
    if WEIGHED:
        values = values.to(tl.float32) * tl.load(probabilities_ptr + slot).to(tl.float32)
    place = rows_ptr + row * columns + column
    tl.store(place, values.to(rows_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gather(
    rows_ptr,
    positions_ptr,
    probabilities_ptr,
    y_ptr,
    columns,
    choices,
    WEIGHED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    slot = token * choices
    for _ in range(choices):
        row = tl.load(positions_ptr + slot)
        values = tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0)
        values = values.to(tl.float32)
        if WEIGHED:
            values *= tl.load(probabilities_ptr + slot).to(tl.float32)
        total += values
        slot += 1
    place = y_ptr + token * columns + column
    tl.store(place, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dot(grad_ptr, rows_ptr, positions_ptr, products_ptr, columns, choices, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    token = slot // choices
    row = tl.load(positions_ptr + slot)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        gradient = tl.load(grad_ptr + token * columns + column, mask=inside, other=0.0)
        values = tl.load(rows_ptr + row * columns + column, mask=inside, other=0.0)
        total += gradient.to(tl.float32) * values.to(tl.float32)
    tl.store(products_ptr + slot, tl.sum(total, 0))
