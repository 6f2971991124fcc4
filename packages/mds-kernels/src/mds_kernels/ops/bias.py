"""What follows a linear layer whose bias was left out so that it can be added here.

Letters: h channels.
"""

from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = [
    "bias_dropout_add",
    "bias_dropout_add_reference",
    "bias_gelu",
    "bias_gelu_reference",
]


def bias_gelu(
    x: Tensor,
    bias: Tensor,
    *,
    approximate: Literal["none", "tanh"] = "none",
    backend: str | None = None,
) -> Tensor:
    """Return ``gelu(x + bias)``.

    Args:
        x: [..., h].
        bias: [h].
        approximate: "none" for the error function, "tanh" for its approximation.
        backend: The backend to use, or None for the registry's choice.
    """
    run = implementation("bias_gelu", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, bias, approximate=approximate)
    return result


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    probability: float,
    keep: Tensor | None = None,
    training: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Return ``residual + dropout(x + bias)``.

    Args:
        x: [..., h].
        bias: [h] or None.
        residual: [..., h].
        probability: Of dropping a value, in [0, 1).
        keep: Boolean [..., h], True where a value stays; for masks that do not depend on the
            layout. None: drawn from torch's generator.
        training: Without it nothing is dropped.
        backend: The backend to use, or None for the registry's choice.
    """
    if not 0 <= probability < 1:
        raise ValueError(f"probability ({probability}) of dropping must be in [0, 1).")
    run = implementation("bias_dropout_add", device=x.device.type, dtype=x.dtype, backend=backend)
    result: Tensor = run(x, bias, residual, probability=probability if training else 0.0, keep=keep)
    return result


def bias_gelu_reference(
    x: Tensor, bias: Tensor, *, approximate: Literal["none", "tanh"] = "none"
) -> Tensor:
    """Return the same in float64."""
    return F.gelu(x.double() + bias.double(), approximate=approximate)


def bias_dropout_add_reference(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, probability: float, keep: Tensor
) -> Tensor:
    """Return the same in float64, for a given mask."""
    total = x.double() if bias is None else x.double() + bias.double()
    return residual.double() + total * keep / (1 - probability)
