"""Bias with what follows it, as plain formulas: torch.compile fuses them, eager keeps no more."""

import torch.nn.functional as F
from torch import Tensor


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    """Return ``gelu(x + bias)``."""
    return F.gelu(x + bias, approximate=approximate)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, *, probability: float, keep: Tensor | None
) -> Tensor:
    """Return ``residual + dropout(x + bias)``."""
    total = x if bias is None else x + bias
    if probability == 0:
        return residual + total
    if keep is None:
        return residual + F.dropout(total, probability)
    return residual + total.masked_fill(~keep, 0.0) * (1 / (1 - probability))
