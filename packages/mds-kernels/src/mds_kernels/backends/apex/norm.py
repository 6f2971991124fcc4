"""The norms of NVIDIA apex."""

from collections.abc import Mapping
from importlib import import_module

from torch import Tensor

from mds_kernels.apex_state import why_not_apex

_EXTENSION = "fused_layer_norm_cuda"


def why_not(_device: str, _environment: Mapping[str, str]) -> str | None:
    """Return why the norms of this machine's apex can't be used, or None."""
    return why_not_apex(_EXTENSION)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return the layer norm of x [..., h]."""
    if bias is None:
        bias = weight.new_zeros(weight.shape)
    return _call("fused_layer_norm_affine", x, weight, bias, weight.shape, eps)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return the RMS norm of x [..., h]."""
    return _call("fused_rms_norm_affine", x, weight, weight.shape, eps)


def _call(function: str, *args: object) -> Tensor:
    module = import_module("apex.normalization.fused_layer_norm")
    result: Tensor = getattr(module, function)(*args)
    return result
