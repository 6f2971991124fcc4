"""Parameters that stand on several stages: one owner, equal copies, one summed gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.groups import ProcessGroups

__all__ = ["SharedParameters"]


class _Shared(NamedTuple):
    """One such parameter, on a rank that holds it."""

    name: str
    parameter: nn.Parameter
    group: ProcessGroup
    owned: bool


class SharedParameters:
    """This rank's part of what stages share; every rank of the layout builds it alike.

    Stages of one rank use one tensor; those of several ranks hold copies.

    Args:
        models: This rank's stages by index.
        stages: Stages that hold each such parameter, by canonical name.
        owners: Rank along the pipeline of every stage.
        groups: This rank's process groups.
    """

    def __init__(
        self,
        models: Mapping[int, nn.Module],
        *,
        stages: Mapping[str, Sequence[int]],
        owners: Sequence[int],
        groups: ProcessGroups,
    ) -> None:
        self._held: list[_Shared] = []
        known: dict[tuple[int, ...], ProcessGroup | None] = {}
        for name, indices in stages.items():
            holders = [models[index] for index in indices if index in models]
            _use_one(holders, name)
            ranks = tuple(sorted({owners[index] for index in indices}))
            if len(ranks) == 1:
                continue
            if ranks not in known:
                known[ranks] = groups.along_pipeline(ranks)
            group = known[ranks]
            if holders and group is not None:
                owned = owners[min(indices)] == groups.pp_rank
                parameter = holders[0].get_parameter(name)
                self._held.append(_Shared(name, parameter, group, owned))

    @property
    def copies(self) -> frozenset[str]:
        """Names of those that another rank owns, counts and saves."""
        return frozenset(each.name for each in self._held if not each.owned)

    def put_aside(self) -> list[Tensor | None]:
        """Take the gradients of earlier steps, which have been summed already."""
        before = [each.parameter.grad for each in self._held]
        for each in self._held:
            each.parameter.grad = None
        return before

    def sum_gradients(self) -> None:
        """Sum this step's gradients over the stages."""
        for each in self._held:
            if each.parameter.grad is not None:
                dist.all_reduce(each.parameter.grad, group=each.group)

    def add(self, before: Sequence[Tensor | None]) -> None:
        """Add what `put_aside` gave."""
        for each, gradient in zip(self._held, before, strict=True):
            if gradient is not None and each.parameter.grad is not None:
                each.parameter.grad.add_(gradient)


def _use_one(models: Sequence[nn.Module], name: str) -> None:
    """Let stages of the same rank use one parameter."""
    path, _, leaf = name.rpartition(".")
    for model in models[1:]:
        setattr(model.get_submodule(path), leaf, models[0].get_parameter(name))
