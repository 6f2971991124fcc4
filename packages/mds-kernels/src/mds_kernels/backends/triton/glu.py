"""Gated activations with their bias in one launch each way.

Letters: n rows, f width of the MLP.
"""

import triton
from torch import Tensor

from mds_kernels.backends.fused.gate import FAKES, gate
from mds_kernels.backends.triton.kernels.gate import (
    GELU_ERF,
    GELU_TANH,
    SILU,
    gate_backward,
    gate_forward,
)
from mds_kernels.backends.triton.launch import next_power_of_two, on_device_of, passes

BLOCK = 1024
_NUMBERS = {"silu": SILU.value, "none": GELU_ERF.value, "tanh": GELU_TANH.value}


def swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``silu(gate) * up`` of x [..., 2 f]."""
    return gate(x, bias, activation="silu", kernels="triton")


def geglu(x: Tensor, bias: Tensor | None, *, approximate: str) -> Tensor:
    """Return ``gelu(gate) * up`` of x [..., 2 f]."""
    return gate(x, bias, activation=approximate, kernels="triton")


@passes(FAKES)
def _gate_forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    block = min(BLOCK, next_power_of_two(width))
    blocks = triton.cdiv(width, block)
    if y.numel():
        with on_device_of(x):
            gate_forward[(rows * blocks,)](
                x,
                x if bias is None else bias.contiguous(),
                y,
                width,
                blocks,
                ACTIVATION=_NUMBERS[activation],
                HAS_BIAS=bias is not None,
                BLOCK=block,
            )
    return y


@passes(FAKES)
def _gate_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    gradient, x = gradient.contiguous(), x.contiguous()
    rows, width = gradient.shape
    grad_x = x.new_empty(x.shape)
    block = min(BLOCK, next_power_of_two(width))
    blocks = triton.cdiv(width, block)
    if gradient.numel():
        with on_device_of(x):
            gate_backward[(rows * blocks,)](
                gradient,
                x,
                x if bias is None else bias.contiguous(),
                grad_x,
                width,
                blocks,
                ACTIVATION=_NUMBERS[activation],
                HAS_BIAS=bias is not None,
                BLOCK=block,
            )
    return grad_x
