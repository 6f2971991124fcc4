"""Gated activations of an MLP: one half of the channels gates the other.

Letters: f width of the MLP.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = ["geglu", "geglu_reference", "swiglu", "swiglu_reference"]

Approximation = Literal["none", "tanh"]


def swiglu(x: Tensor, bias: Tensor | None = None, *, backend: str | None = None) -> Tensor:
    """Return ``silu(gate) * up`` [..., f]; the backward pass keeps only ``x`` and ``bias``.

    Args:
        x: [..., 2 f], the gate's channels first.
        bias: [2 f] added to ``x``, or None.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, bias)
    run = implementation("swiglu", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, bias)
    return result


def geglu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Approximation = "none",
    backend: str | None = None,
) -> Tensor:
    """Return ``gelu(gate) * up`` [..., f]; the backward pass keeps only ``x`` and ``bias``.

    Args:
        x: [..., 2 f], the gate's channels first.
        bias: [2 f] added to ``x``, or None.
        approximate: "none" for the error function, "tanh" for its approximation.
        backend: The backend to use, or None for the registry's choice.
    """
    _check(x, bias)
    run = implementation("geglu", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, bias, approximate=approximate)
    return result


def swiglu_reference(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the same in float64, in the plainest way."""
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


def geglu_reference(
    x: Tensor, bias: Tensor | None = None, *, approximate: Approximation = "none"
) -> Tensor:
    """Return the same in float64, in the plainest way."""
    gate, up = _biased(x, bias).chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.double() if bias is None else x.double() + bias.double()


def _check(x: Tensor, bias: Tensor | None) -> None:
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"x must be [..., 2 f], gate and up side by side; got {tuple(x.shape)}, whose last "
            f"dimension is odd."
        )
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias must be [2 f] = {tuple(x.shape[-1:])}; got {tuple(bias.shape)}.")
