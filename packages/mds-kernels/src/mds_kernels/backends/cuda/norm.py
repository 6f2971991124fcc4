"""Residual add and norm in one launch forward.

Letters: h hidden.
"""

from torch import Tensor

from mds_kernels.backends.fused.norm import norm, one_dtype
from mds_kernels.backends.torch import norm as plain


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual`` and that sum; mixed dtypes by torch."""
    if not one_dtype(x, residual, weight, bias):
        return plain.add_layer_norm(x, residual, weight, bias, eps=eps)
    return norm(x, residual, weight, bias, eps=eps, centred=True, kernels="cuda")


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual`` and that sum; mixed dtypes by torch."""
    if not one_dtype(x, residual, weight, None):
        return plain.add_rms_norm(x, residual, weight, eps=eps)
    return norm(x, residual, weight, None, eps=eps, centred=False, kernels="cuda")
