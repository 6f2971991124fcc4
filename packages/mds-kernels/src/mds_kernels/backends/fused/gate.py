"""Gated activations that keep only their inputs.

Letters: n rows, f width of the MLP.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from mds_kernels.backends.torch.glu import sum_rows
from mds_kernels.backends.torch.graph_op import ops_of


def gate(x: Tensor, bias: Tensor | None, *, activation: str, kernels: str) -> Tensor:
    """Return [..., f] ``activation(gate) * up`` of x [..., 2 f].

    Args:
        x: [..., 2 f].
        bias: [2 f] or None.
        activation: "silu", or gelu's "none" or "tanh".
        kernels: The backend whose passes are used.
    """
    rows = x.reshape(-1, x.shape[-1])
    result = cast("Tensor", _Gate.apply(rows, bias, activation, kernels))  # type: ignore[no-untyped-call]
    return result.view(*x.shape[:-1], x.shape[-1] // 2)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, kernels: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.activation, ctx.kernels = activation, kernels
        return cast("Tensor", ops_of(kernels, "gate_forward")(x, bias, activation))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        grad_x = ops_of(ctx.kernels, "gate_backward")(gradient, x, bias, ctx.activation)
        wanted = bias is not None and ctx.needs_input_grad[1]
        return grad_x, sum_rows(grad_x, bias) if wanted else None, None, None


def _fake_forward(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


def _fake_backward(gradient: Tensor, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape)


FAKES: dict[str, Callable[..., Any]] = {
    "gate_forward": _fake_forward,
    "gate_backward": _fake_backward,
}
"""Shapes of the results of each pass, for every backend."""
