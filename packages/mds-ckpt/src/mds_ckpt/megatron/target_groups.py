"""The optimizer's parameter groups of a target: decayed or not, and experts apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mds_ckpt.checkpoint import LazyTensor
from mds_ckpt.megatron.naming import Named, expert_of

__all__ = ["Member", "ParameterGroup", "divide_groups", "settings_of"]


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a group."""

    named: Named
    stored: str
    """As the engine calls it; experts are numbered on each rank from 0."""


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters with the same settings, in the order in which the optimizer has them."""

    members: tuple[Member, ...]
    decays: bool
    is_expert: bool = False


def divide_groups(
    members: Sequence[Member], tensors: Mapping[str, LazyTensor]
) -> list[ParameterGroup]:
    """Megatron's groups: with weight decay, without (biases and all 1-D), then experts likewise.

    The first two are always there, the experts' only if they have members.
    """
    groups: dict[tuple[bool, bool], list[Member]] = {(False, True): [], (False, False): []}
    for member in members:
        name = member.named.name
        is_plain = name.endswith(".bias") or len(tensors[name].shape) == 1
        groups.setdefault((expert_of(name) is not None, not is_plain), []).append(member)
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], not item[0][1]))
    return [
        ParameterGroup(tuple(found), decays, is_expert)
        for (is_expert, decays), found in ordered
        if found or not is_expert
    ]


def settings_of(
    group: ParameterGroup,
    recorded: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    *,
    ep_size: int,
) -> dict[str, Any]:
    """What a group is set to: as the source recorded it, else by the stored arguments.

    Args:
        group: The target's group.
        recorded: The source's groups, each with its settings and its ``parameters``' names.
        args: The training script's arguments.
        ep_size: Ranks that share experts out, which names their group.
    """
    known = dict(_counterpart(group, recorded))
    known.pop("parameters", None)
    if isinstance(known.get("betas"), list):
        known["betas"] = tuple(known["betas"])
    decay = args.get("weight_decay", 0.01)
    defaults = {
        "wd_mult": 1.0 if group.decays else 0.0,
        "lr_mult": 1.0,
        "lr": args.get("lr") or 0.0,
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "weight_decay": decay if group.decays else 0.0,
    }
    own = {"name": f"ep_size_{ep_size}", "moe": True} if group.is_expert else {}
    return {**defaults, **known, **own}


def _counterpart(group: ParameterGroup, recorded: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The source's group that holds a member of ``group``, or the one at its place."""
    names = {member.named.name for member in group.members}
    for found in recorded:
        if not names.isdisjoint(found.get("parameters") or ()):
            return found
    index = (0 if group.decays else 1) + (2 if group.is_expert else 0)
    fits = index < len(recorded) and not recorded[index].get("parameters")
    return recorded[index] if fits else {}
