"""Norms, alone and after a residual add, that read each row once.

Letters: h hidden.
"""

from torch import Tensor

from mds_kernels.backends.fused.norm import norm, one_dtype
from mds_kernels.backends.torch import norm as plain


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return the RMS norm of x [..., h]; mixed dtypes by torch."""
    if not one_dtype(x, weight):
        return plain.rms_norm(x, weight, eps=eps)
    return norm(x, None, weight, None, eps=eps, centred=False, kernels="cpu")[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the layer norm of ``x + residual`` and that sum; mixed dtypes by torch."""
    if not one_dtype(x, residual, weight, bias):
        return plain.add_layer_norm(x, residual, weight, bias, eps=eps)
    return norm(x, residual, weight, bias, eps=eps, centred=True, kernels="cpu")


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of ``x + residual`` and that sum; mixed dtypes by torch."""
    if not one_dtype(x, residual, weight):
        return plain.add_rms_norm(x, residual, weight, eps=eps)
    return norm(x, residual, weight, None, eps=eps, centred=False, kernels="cpu")
