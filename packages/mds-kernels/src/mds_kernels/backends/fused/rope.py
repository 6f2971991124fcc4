"""Rotary position embedding of queries and keys by one pass.

Letters: n heads, d head dim, r rotated channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mds_kernels.backends.torch.graph_op import ops_of

_FORTH, _BACK = False, True


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, kernels: str
) -> tuple[Tensor, Tensor]:
    """Rotate query [..., n, d] and key [..., n_kv, d], whose leading dimensions are equal."""
    rotated: tuple[Tensor, Tensor] = _Rope.apply(query, key, cos, sin, interleaved, kernels)  # type: ignore[no-untyped-call]
    return rotated


class _Rope(torch.autograd.Function):
    """Keeps the angles only."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,  # noqa: FBT001 - autograd passes all arguments by place
        kernels: str,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.kernels = interleaved, kernels
        rotated: tuple[Tensor, Tensor] = ops_of(kernels, "rope")(
            query, key, cos, sin, interleaved, _FORTH
        )
        return rotated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor) -> tuple[Tensor | None, ...]:
        back = ops_of(ctx.kernels, "rope")
        turned = back(grad_query, grad_key, *ctx.saved_tensors, ctx.interleaved, _BACK)
        return *turned, None, None, None, None


def _fake(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


FAKES: dict[str, Callable[..., Any]] = {"rope": _fake}
"""Shapes of the results of each pass, for every backend."""
