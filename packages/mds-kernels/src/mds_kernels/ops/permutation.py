"""Bring tokens into the order of their experts and back, as mixtures of experts need.

Letters: n tokens, k experts a token, h hidden, e experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mds_kernels.dispatch import implementation

__all__ = [
    "Permuted",
    "moe_permute",
    "moe_permute_reference",
    "moe_unpermute",
    "moe_unpermute_reference",
]


class Permuted(NamedTuple):
    """What ``moe_permute`` returns."""

    tokens: Tensor
    """[n k, h] each token once for each of its experts, the first expert's rows first."""
    tokens_per_expert: Tensor
    """[e] int64 how many rows each expert got."""
    positions: Tensor
    """[n, k] int64 the row that a token has with its k-th expert; ``moe_unpermute`` takes it."""


def moe_permute(
    x: Tensor, experts: Tensor, *, num_experts: int, backend: str | None = None
) -> Permuted:
    """Return the rows of ``x`` sorted by expert; rows of one expert keep the order of the tokens.

    No token is dropped. The gradient of ``x`` gathers its rows, so it is the same in every run.

    Args:
        x: [n, h].
        experts: [n, k] int64, the experts of each token, in [0, num_experts).
        num_experts: How many experts there are.
        backend: The backend to use, or None for the registry's choice.

    Raises:
        ValueError: Shapes don't fit, or (on a CPU) an expert does not exist.
    """
    if x.dim() != 2 or experts.dim() != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"x must be [n, h] and experts [n, k]; got {tuple(x.shape)} and "
            f"{tuple(experts.shape)}. Flatten the batch and sequence dimensions first."
        )
    if experts.dtype != torch.int64:
        raise ValueError(f"experts are {experts.dtype}; they must be int64: experts.long().")
    run = implementation("moe_permute", device=x.device.type, dtype=x.dtype, backend=backend)
    return Permuted(*run(x, experts, num_experts=num_experts))


def moe_unpermute(
    rows: Tensor,
    positions: Tensor,
    probabilities: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """Return for each token the weighted sum of its experts' rows, added up in fp32.

    Args:
        rows: [n k, h] in the order of ``Permuted.tokens``.
        positions: [n, k] int64 ``Permuted.positions``.
        probabilities: [n, k] weights of the experts, differentiable; None: ones.
        backend: The backend to use, or None for the registry's choice.

    Returns:
        [n, h] in the dtype of ``rows``.
    """
    if rows.dim() != 2 or positions.dim() != 2 or positions.numel() != rows.shape[0]:
        raise ValueError(
            f"rows must be [n k, h] and positions [n, k]; got {tuple(rows.shape)} and "
            f"{tuple(positions.shape)}."
        )
    if probabilities is not None and probabilities.shape != positions.shape:
        raise ValueError(
            f"probabilities must be [n, k] = {tuple(positions.shape)}; got "
            f"{tuple(probabilities.shape)}."
        )
    run = implementation(
        "moe_unpermute", device=rows.device.type, dtype=rows.dtype, backend=backend
    )
    result: Tensor = run(rows, positions, probabilities)
    return result


def moe_permute_reference(x: Tensor, experts: Tensor, *, num_experts: int) -> Tensor:
    """Return [n k, h] in float64, an expert and a token at a time."""
    rows = [
        x[token].double()
        for expert in range(num_experts)
        for token in range(x.shape[0])
        for chosen in experts[token].tolist()
        if chosen == expert
    ]
    return torch.stack(rows) if rows else x.double()[:0]


def moe_unpermute_reference(
    rows: Tensor, positions: Tensor, probabilities: Tensor | None = None
) -> Tensor:
    """Return [n, h] in float64, in the plainest way."""
    picked = rows.double()[positions]
    weights = torch.ones_like(positions) if probabilities is None else probabilities
    return (picked * weights.double()[..., None]).sum(dim=1)
