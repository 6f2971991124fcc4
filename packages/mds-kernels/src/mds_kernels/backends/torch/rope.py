"""Rotary position embedding whose backward pass is the rotation the other way round."""

from typing import Any, cast

import torch
from torch import Tensor


def rope(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate query [..., n, d] and key [..., n_kv, d]."""
    if torch.compiler.is_compiling():
        return _rotate(query, cos, sin, interleaved=interleaved), _rotate(
            key, cos, sin, interleaved=interleaved
        )
    return (
        cast("Tensor", _Rope.apply(query, cos, sin, interleaved)),  # type: ignore[no-untyped-call]
        cast("Tensor", _Rope.apply(key, cos, sin, interleaved)),  # type: ignore[no-untyped-call]
    )


class _Rope(torch.autograd.Function):
    """Keeps the angles only; plain torch would keep both halves of its input in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:  # noqa: FBT001
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved=interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(gradient, cos, -sin, interleaved=ctx.interleaved), None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    channels = 2 * cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    first, second = _pairs(x[..., :channels].to(dtype), interleaved=interleaved)
    cos, sin = cos.to(dtype), sin.to(dtype)
    rotated = _join(first * cos - second * sin, second * cos + first * sin, interleaved=interleaved)
    if channels == x.shape[-1]:
        return rotated.to(x.dtype)
    return torch.cat([rotated.to(x.dtype), x[..., channels:]], dim=-1)


def _join(first: Tensor, second: Tensor, *, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([first, second], dim=-1).flatten(-2)
    return torch.cat([first, second], dim=-1)


def _pairs(x: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
