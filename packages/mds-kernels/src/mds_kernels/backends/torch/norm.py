"""Norms, alone and after a residual add. torch's own are fused on CUDA and right everywhere."""

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return the layer norm of x [..., h]."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return the RMS norm of x [..., h]."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual`` and that sum."""
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps), total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual`` and that sum."""
    total = x + residual
    return rms_norm(total, weight, eps=eps), total
