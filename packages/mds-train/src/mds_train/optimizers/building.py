"""Builds the optimizer: parameters in two groups, decayed and not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mds_core.models import no_weight_decay
from mds_train.config import OptimizerConfig
from mds_train.optimizers.lion import Lion

__all__ = [
    "DECAYED",
    "UNDECAYED",
    "build_optimizer",
    "group_names",
    "parameter_groups",
    "set_hyperparameters",
]

DECAYED = "decayed"
UNDECAYED = "undecayed"


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    experts: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Split parameters into matrices, which are decayed, and biases and norms, which are not.

    Args:
        parameters: Canonical names and parameters; of ZeRO-3 before they are cut.
        weight_decay: Decay of the first group.
        experts: Names of those that other ranks hold other ones of; they get groups of their own.

    Returns:
        Up to two groups, or four with experts, with the keys "kind" (decayed or not), "expert",
        "name" (for both), "names", "params" and "weight_decay"; empty ones are left out.
    """
    groups: list[dict[str, Any]] = [
        {
            "name": f"{'expert ' * expert}{kind}",
            "kind": kind,
            "expert": expert,
            "names": [],
            "params": [],
            "weight_decay": weight_decay if kind == DECAYED else 0.0,
        }
        for expert in (False, True)
        for kind in (DECAYED, UNDECAYED)
    ]
    for name, parameter in parameters:
        undecayed = no_weight_decay(name, tuple(parameter.shape))
        group = groups[2 * (name in experts) + undecayed]
        group["names"].append(name)
        group["params"].append(parameter)
    return [group for group in groups if group["params"]]


def group_names(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, list[str]]:
    """Names of each group's parameters, by the name of the group."""
    groups: dict[str, list[str]] = {DECAYED: [], UNDECAYED: []}
    for name, shape in shapes.items():
        groups[UNDECAYED if no_weight_decay(name, shape) else DECAYED].append(name)
    return groups


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    config: OptimizerConfig,
    experts: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The optimizer of the [optimizer] table, in torch's fused form where there is one."""
    groups = parameter_groups(parameters, weight_decay=config.weight_decay, experts=experts)
    betas = (config.beta1, config.beta2)
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=betas)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, *, lr: float, weight_decay: float
) -> None:
    """Write the schedule's values of this step into the groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if group["kind"] == DECAYED:
            group["weight_decay"] = weight_decay
