"""Gated activations that keep only their inputs: plain torch would keep the activated gate too.

Letters: f width of the MLP.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def swiglu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``silu(gate) * up`` of x [..., 2 f]."""
    return _run(x, bias, "silu")


def geglu(x: Tensor, bias: Tensor | None, *, approximate: str) -> Tensor:
    """Return ``gelu(gate) * up`` of x [..., 2 f]."""
    return _run(x, bias, approximate)


def _run(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if torch.compiler.is_compiling():
        # The compiler fuses the plain formula and recomputes what is cheap by itself.
        gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
        return _activate(gate, activation) * up
    return cast("Tensor", _Gated.apply(x, bias, activation))  # type: ignore[no-untyped-call]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation = activation
        gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
        return _activate(gate, activation).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        gate, up = (x if bias is None else x + bias).chunk(2, dim=-1)
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(gradient, _activate(gate, ctx.activation), out=grad_up)
        grad_gate.copy_(_activation_gradient(gradient * up, gate, ctx.activation))
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[1]:
            grad_bias = sum_rows(grad_x, bias)
        return grad_x, grad_bias, None


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate=activation)


def _activation_gradient(gradient: Tensor, gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return cast("Tensor", aten.silu_backward(gradient, gate))
    return cast("Tensor", aten.gelu_backward(gradient, gate, approximate=activation))


def sum_rows(gradient: Tensor, like: Tensor) -> Tensor:
    """Return [2 f] the sum over all other dimensions; torch accumulates 16-bit sums in fp32."""
    return gradient.reshape(-1, like.shape[0]).sum(dim=0).to(like.dtype)
