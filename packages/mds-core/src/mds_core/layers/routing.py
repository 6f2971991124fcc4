"""Which experts each token is sent to, with which weight, and what uneven use costs.

Pure functions of the router's scores. Shapes: ``b`` micro batch, ``s`` sequence, ``e`` experts of
the layer, ``k`` experts that a token chooses, ``n`` tokens.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mds_core.collectives import reduce
from mds_core.config import BalanceChoices, BalanceScope

__all__ = ["Choice", "balance_loss", "choose", "places", "weights_of", "z_loss"]


class Choice(NamedTuple):
    """The experts that tokens choose."""

    experts: Tensor
    """[..., k] int64 numbers, the most probable first."""
    gates: Tensor
    """[..., k] their probabilities."""


def choose(scores: Tensor, *, topk: int, noise: Tensor | None = None) -> tuple[Tensor, Choice]:
    """Turn scores into probabilities, and choose experts.

    Args:
        scores: [..., e].
        topk: How many experts; with noise 1 or 2.
        noise: [..., e], Gumbel numbers with which a single expert, or the second of two, is drawn;
            the most probable ones are taken if None. Probabilities do not change by it.

    Returns:
        Probabilities [..., e], and the choice.
    """
    probabilities = scores.softmax(dim=-1)
    if noise is None:
        gates, experts = probabilities.topk(topk, dim=-1)
        return probabilities, Choice(experts, gates)
    noisy = scores.detach() + noise
    if topk == 1:
        experts = noisy.argmax(-1, keepdim=True)
    else:
        first = scores.argmax(-1, keepdim=True)
        rest = noisy.scatter(-1, first, -torch.inf)
        experts = torch.cat([first, rest.argmax(-1, keepdim=True)], dim=-1)
    return probabilities, Choice(experts, probabilities.gather(-1, experts))


def places(
    choice: Choice, *, experts: int, capacity: int, policy: Literal["position", "probability"]
) -> Tensor:
    """Say which choices get one of the ``capacity`` places of their expert.

    Args:
        choice: Of n tokens, [n, k].
        experts: Their number e.
        capacity: Places of each expert.
        policy: With "position" all first choices come before all second ones, earlier tokens before
            later ones; with "probability" the choices with the largest gates come first.

    Returns:
        [n, k] bool.
    """
    wanted = choice.experts.mT.flatten()  # [k n], first choices first
    order = torch.arange(len(wanted), device=wanted.device)
    if policy == "probability":
        order = choice.gates.detach().mT.flatten().argsort(descending=True, stable=True)
    chosen = torch.nn.functional.one_hot(wanted[order], experts)  # [k n, e]
    before = (chosen.cumsum(0) * chosen).sum(-1) - 1  # choices of the same expert ahead in line
    kept = torch.empty_like(before, dtype=torch.bool)
    kept[order] = before < capacity
    return kept.view(choice.experts.mT.shape).mT


def weights_of(gates: Tensor, kept: Tensor | None, *, normalize: bool) -> Tensor:
    """The weights [n, k] of a token's experts: gates, perhaps made to sum to 1.

    Args:
        gates: [n, k] probabilities.
        kept: [n, k] bool, choices that got a place; all if None.
        normalize: Divide by the sum of what was kept.
    """
    weights = gates if kept is None else gates * kept
    if not normalize:
        return weights
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def balance_loss(
    probabilities: Tensor,
    experts: Tensor,
    *,
    scope: BalanceScope,
    choices: BalanceChoices,
    shared_by: tuple[ProcessGroup | None, ...] = (),
) -> Tensor:
    """What uneven use costs: about 1 where each expert gets its even share, more where not.

    It is the mean probability of an expert times its share of the choices, summed over the experts
    and multiplied by their number (Switch Transformer, eq. 4).

    Args:
        probabilities: [b, s, e], of this rank's positions.
        experts: [b, s, k].
        scope: Whether the means go over each sequence, or over all b of them.
        choices: Whether all choices count or the first.
        shared_by: Groups of ranks that hold other positions of the same sequences.

    Returns:
        [b]; with the micro batch as scope all alike.
    """
    count = probabilities.size(-1)
    counted = experts if choices == "all" else experts[..., :1]
    used = torch.nn.functional.one_hot(counted, count).sum(2).to(probabilities.dtype)
    positions = probabilities.new_tensor(float(probabilities.size(1)))
    sums = torch.stack([probabilities.sum(1), used.sum(1) / counted.size(-1)])  # [2, b, e]
    for group in shared_by:
        sums = reduce(sums, group=group)
        positions = positions * (1 if group is None else group.size())
    means, shares = sums / positions
    if scope == "micro_batch":
        means, shares = means.mean(0, keepdim=True), shares.mean(0, keepdim=True)
    losses: Tensor = (means * shares).sum(-1) * count
    return losses.expand(len(probabilities))


def z_loss(scores: Tensor, *, shared_by: tuple[ProcessGroup | None, ...] = ()) -> Tensor:
    """Mean square of each sequence's log of the sum of exponentials (ST-MoE, eq. 5).

    Args:
        scores: [b, s, e], of this rank's positions.
        shared_by: Groups of ranks that hold other positions of the same sequences.

    Returns:
        [b].
    """
    means = scores.logsumexp(-1).square().mean(1)
    for group in shared_by:
        means = reduce(means, group=group) / (1 if group is None else group.size())
    return means
