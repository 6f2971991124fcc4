"""Rows sorted by expert and back, each pass one launch.

Letters: n tokens, k experts a token, h hidden.
"""

import torch
import triton
from torch import Tensor

from mds_kernels.backends.torch import permutation as shared
from mds_kernels.backends.triton.kernels import permutation as kernels
from mds_kernels.backends.triton.launch import next_power_of_two, on_device_of, passes

BLOCK = 1024


def moe_permute(x: Tensor, experts: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [n k, h], rows per expert [e], and positions [n, k]."""
    return shared.moe_permute(x, experts, num_experts=num_experts, kernels="triton")


def moe_unpermute(rows: Tensor, positions: Tensor, probabilities: Tensor | None) -> Tensor:
    """Return [n, h] the weighted sum of each token's rows."""
    return shared.moe_unpermute(rows, positions, probabilities, kernels="triton")


@passes(shared.FAKES)
def _spread(x: Tensor, order: Tensor, choices: int, probabilities: Tensor | None) -> Tensor:
    x = x.contiguous()
    rows = x.new_empty(order.shape[0], x.shape[1])
    if rows.numel():
        block = min(BLOCK, next_power_of_two(x.shape[1]))
        with on_device_of(x):
            kernels.spread[(rows.shape[0], triton.cdiv(x.shape[1], block))](
                x,
                order.contiguous(),
                x if probabilities is None else probabilities.contiguous(),
                rows,
                x.shape[1],
                choices,
                WEIGHED=probabilities is not None,
                BLOCK=block,
            )
    return rows


@passes(shared.FAKES)
def _gather(rows: Tensor, positions: Tensor, probabilities: Tensor | None) -> Tensor:
    rows = rows.contiguous()
    y = rows.new_empty(positions.shape[0], rows.shape[1])
    if y.numel():
        block = min(BLOCK, next_power_of_two(rows.shape[1]))
        with on_device_of(rows):
            kernels.gather[(y.shape[0], triton.cdiv(rows.shape[1], block))](
                rows,
                positions.contiguous(),
                rows if probabilities is None else probabilities.contiguous(),
                y,
                rows.shape[1],
                positions.shape[1],
                WEIGHED=probabilities is not None,
                BLOCK=block,
            )
    return y


@passes(shared.FAKES)
def _dot(gradient: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    gradient, rows = gradient.contiguous(), rows.contiguous()
    products = gradient.new_empty(positions.shape, dtype=torch.float32)
    if products.numel():
        with on_device_of(rows):
            kernels.dot[(products.numel(),)](
                gradient,
                rows,
                positions.contiguous(),
                products,
                rows.shape[1],
                positions.shape[1],
                BLOCK=min(BLOCK, next_power_of_two(rows.shape[1])),
            )
    return products
