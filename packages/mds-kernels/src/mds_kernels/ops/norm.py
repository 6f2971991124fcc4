"""Layer norm and RMS norm over the last dimension, alone and fused with a residual add.

Letters: h hidden.
"""

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_reference",
    "rms_norm",
    "rms_norm_reference",
]


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> Tensor:
    """Return ``(x - mean) / sqrt(variance + eps) * weight + bias`` in the dtype of ``x``.

    Args:
        x: [..., h].
        weight: [h].
        bias: [h] or None.
        eps: Added to the variance.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, weight)
    run = implementation("layer_norm", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, weight, bias, eps=eps)
    return result


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5, backend: str | None = None) -> Tensor:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` in the dtype of ``x``.

    Args:
        x: [..., h].
        weight: [h].
        eps: Added to the mean of the squares.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, weight)
    run = implementation("rms_norm", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, weight, eps=eps)
    return result


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual``, and that sum, which is the next residual.

    Args:
        x: [..., h].
        residual: [..., h].
        weight: [h].
        bias: [h] or None.
        eps: Added to the variance.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, weight)
    run = implementation("add_layer_norm", device=x.device.type, dtype=x.dtype, backend=backend)
    result: tuple[Tensor, Tensor] = run(x, residual, weight, bias, eps=eps)
    return result


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-5,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual``, and that sum, which is the next residual.

    Args:
        x: [..., h].
        residual: [..., h].
        weight: [h].
        eps: Added to the mean of the squares.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, weight)
    run = implementation("add_rms_norm", device=x.device.type, dtype=x.dtype, backend=backend)
    result: tuple[Tensor, Tensor] = run(x, residual, weight, eps=eps)
    return result


def layer_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Return the layer norm in float64, in the plainest way."""
    x = x.double()
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return normed * weight.double() + (0 if bias is None else bias.double())


def rms_norm_reference(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    """Return the RMS norm in float64, in the plainest way."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


def _check(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must be [h] with h the last dimension of x; got {tuple(weight.shape)} for x "
            f"{tuple(x.shape)}."
        )
