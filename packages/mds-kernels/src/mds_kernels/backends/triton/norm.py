"""Residual add and norm in one launch each way.

Letters: n rows, h hidden.
"""

import torch
import triton
from torch import Tensor

from mds_kernels.backends.fused.norm import FAKES, norm
from mds_kernels.backends.torch import norm as plain
from mds_kernels.backends.triton.kernels.norm import add_norm_backward, add_norm_forward
from mds_kernels.backends.triton.launch import (
    LONGEST_ROW,
    num_programs,
    on_device_of,
    passes,
    row_block,
)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual`` and that sum; very long rows by torch."""
    if x.shape[-1] > LONGEST_ROW:
        return plain.add_layer_norm(x, residual, weight, bias, eps=eps)
    return norm(x, residual, weight, bias, eps=eps, centred=True, kernels="triton")


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual`` and that sum; very long rows by torch."""
    if x.shape[-1] > LONGEST_ROW:
        return plain.add_rms_norm(x, residual, weight, eps=eps)
    return norm(x, residual, weight, None, eps=eps, centred=False, kernels="triton")


@passes(FAKES)
def _norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,  # noqa: FBT001 - a graph op's arguments are positional
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert residual is not None
    rows, columns = x.shape
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else rstd.new_empty(0)
    block, warps = row_block(columns)
    if rows:
        with on_device_of(x):
            add_norm_forward[(rows,)](
                x,
                residual,
                weight,
                weight if bias is None else bias,
                y,
                total,
                mean if centred else rstd,
                rstd,
                columns,
                eps,
                CENTRED=centred,
                HAS_BIAS=bias is not None,
                BLOCK=block,
                num_warps=warps,
            )
    return y, total, mean, rstd


@passes(FAKES)
def _norm_backward(
    grad_y: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    centred: bool,  # noqa: FBT001
    with_bias: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = total.shape
    programs = min(num_programs(total), max(rows, 1))
    grad_x = total.new_empty(total.shape)
    weight_parts = rstd.new_empty(programs, columns)
    bias_parts = rstd.new_empty(programs if with_bias else 0, columns)
    block, warps = row_block(columns)
    with on_device_of(total):
        add_norm_backward[(programs,)](
            grad_y,
            grad_y if grad_total is None else grad_total,
            total,
            weight,
            mean if centred else rstd,
            rstd,
            grad_x,
            weight_parts,
            bias_parts if with_bias else weight_parts,
            rows,
            columns,
            triton.cdiv(rows, programs),
            CENTRED=centred,
            HAS_BIAS=with_bias,
            HAS_GRAD_TOTAL=grad_total is not None,
            BLOCK=block,
            num_warps=warps,
        )
    # The parts are added in a fixed order: no atomics, the same sum in every run.
    grad_bias = bias_parts.sum(dim=0) if with_bias else rstd.new_empty(0)
    return grad_x, weight_parts.sum(dim=0).to(weight.dtype), grad_bias.to(weight.dtype)
