"""Residual add and norm: one program a row; the backward pass walks rows and sums the weights'.

Letters: n rows, h hidden (columns).
"""
# ruff: noqa: ANN001, ANN201, N803, D103
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def add_norm_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    columns,
    eps,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    place = row * columns + column
    total = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    # What is stored is what is normed, so that the backward pass sees the same numbers.
    stored = total.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + place, stored, mask=inside)
    wide = stored.to(tl.float32)
    if CENTRED:
        mean = tl.sum(wide, 0) / columns
        tl.store(mean_ptr + row, mean)
        wide = tl.where(inside, wide - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    y = wide * rstd * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    grad_ptr,
    grad_total_ptr,
    total_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    grad_x_ptr,
    weight_part_ptr,
    bias_part_ptr,
    rows,
    columns,
    rows_each,
    CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GRAD_TOTAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    weight_part = tl.zeros((BLOCK,), tl.float32)
    bias_part = tl.zeros((BLOCK,), tl.float32)
    first = program * rows_each
    last = tl.minimum(first + rows_each, rows)
    # The loop's variable is a plain number when interpreted, so the 64-bit place walks beside it.
    place = first.to(tl.int64) * columns + column
    for row in range(first, last):
        gradient = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(total_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if CENTRED:
            normed = tl.where(inside, normed - tl.load(mean_ptr + row), 0.0)
        normed = normed * rstd
        weight_part += gradient * normed
        if HAS_BIAS:
            bias_part += gradient
        # Loaded for every row, from the cache: held in registers it would make others spill.
        gradient *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        inner = gradient - normed * (tl.sum(gradient * normed, 0) / columns)
        if CENTRED:
            inner = inner - tl.sum(gradient, 0) / columns
        grad_x = inner * rstd
        if HAS_GRAD_TOTAL:
            grad_x += tl.load(grad_total_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + place, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        place += columns
    part = program.to(tl.int64) * columns + column
    tl.store(weight_part_ptr + part, weight_part, mask=inside)
    if HAS_BIAS:
        tl.store(bias_part_ptr + part, bias_part, mask=inside)
