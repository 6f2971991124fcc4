"""Builds the optimizer: parameters in two groups, decayed and not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from mds_train.config import OptimizerConfig
from mds_train.optimizers.kinds import DECAYED, MATRICES, UNDECAYED, kind_of
from mds_train.optimizers.lion import Lion
from mds_train.optimizers.muon import Muon

__all__ = [
    "build_optimizer",
    "group_names",
    "parameter_groups",
    "set_hyperparameters",
]


_KINDS = (MATRICES, DECAYED, UNDECAYED)


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    experts: Collection[str] = (),
    muon: bool = False,
) -> list[dict[str, Any]]:
    """Split parameters into weights, which are decayed, and biases and norms, which are not.

    Args:
        parameters: Canonical names and parameters; of ZeRO-3 before they are cut.
        weight_decay: Decay of the first group.
        experts: Names of those that other ranks hold other ones of; they get groups of their own.
        muon: Give the matrices of the layers a group of their own, which comes first.

    Returns:
        Up to two groups (three with Muon), or twice as many with experts, with the keys "kind",
        "expert", "name" (for both), "names", "params" and "weight_decay"; empty ones are left out.
    """
    groups: list[dict[str, Any]] = [
        {
            "name": f"{'expert ' * expert}{kind}",
            "kind": kind,
            "expert": expert,
            "names": [],
            "params": [],
            "weight_decay": 0.0 if kind == UNDECAYED else weight_decay,
        }
        for expert in (False, True)
        for kind in _KINDS
    ]
    for name, parameter in parameters:
        kind = kind_of(name, parameter.shape, muon=muon)
        group = groups[len(_KINDS) * (name in experts) + _KINDS.index(kind)]
        group["names"].append(name)
        group["params"].append(parameter)
    return [group for group in groups if group["params"]]


def group_names(
    shapes: Mapping[str, tuple[int, ...]], *, muon: bool = False
) -> dict[str, list[str]]:
    """Names of each group's parameters, by the kind of the group."""
    groups: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for name, shape in shapes.items():
        groups[kind_of(name, shape, muon=muon)].append(name)
    return groups


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    config: OptimizerConfig,
    experts: Collection[str] = (),
) -> torch.optim.Optimizer:
    """The optimizer of the [optimizer] table, in torch's fused form where there is one."""
    groups = parameter_groups(
        parameters,
        weight_decay=config.weight_decay,
        experts=experts,
        muon=config.name == "muon",
    )
    betas = (config.beta1, config.beta2)
    if config.name == "lion":
        return Lion(groups, lr=config.lr, betas=betas)
    momentum = config.usual_momentum
    if config.name == "muon":
        return Muon(groups, lr=config.lr, betas=betas, eps=config.eps, momentum=momentum)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=momentum, fused=True)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)


def set_hyperparameters(
    optimizer: torch.optim.Optimizer, *, lr: float, weight_decay: float
) -> None:
    """Write the schedule's values of this step into the groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        if group["kind"] != UNDECAYED:
            group["weight_decay"] = weight_decay
