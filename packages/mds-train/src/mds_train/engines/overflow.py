"""Which gradients were not finite: looked up only when a step is skipped for them.

DeepSpeed's ZeRO classes find out inside their step and then forget the gradients; in between they
move the loss scale, and that is the moment to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mds_train.engines.deepspeed_state import gradients_of_partitions, offloads, whole_gradients
from mds_train.engines.interface import BrokenGradient

__all__ = ["OverflowWatch"]


class OverflowWatch:
    """Names this rank's gradients that are not finite.

    Args:
        optimizer: DeepSpeed's optimizer.
        names: Canonical name by ``id`` of the parameter.
    """

    def __init__(self, optimizer: Any, *, names: Mapping[int, str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._found: tuple[BrokenGradient, ...] = ()
        if hasattr(optimizer, "averaged_gradients"):
            self._move_scale = optimizer._update_scale
            optimizer._update_scale = self._look_and_move_scale

    def _look_and_move_scale(self, has_overflow: bool = False) -> None:  # noqa: FBT001, FBT002
        if has_overflow:
            self._found = _broken(gradients_of_partitions(self._optimizer, names=self._names))
            if offloads(self._optimizer):
                # DeepSpeed 0.19 would keep those in half precision and add the next step's to them.
                for index in self._optimizer.averaged_gradients:
                    self._optimizer.averaged_gradients[index] = None
        self._move_scale(has_overflow)

    def look(self) -> None:
        """Look at gradients that every rank has whole, before they are forgotten."""
        whole = whole_gradients(self._optimizer) or ()
        self._found = _broken((self._names[id(parameter)], each) for parameter, each in whole)

    def taken(self) -> tuple[BrokenGradient, ...]:
        """What was found since the last call."""
        found, self._found = self._found, ()
        return found


@torch.no_grad()
def _broken(gradients: Iterable[tuple[str, Tensor]]) -> tuple[BrokenGradient, ...]:
    counted = [(name, each, int((~each.isfinite()).sum())) for name, each in gradients]
    return tuple(
        BrokenGradient(name=name, count=count, numel=each.numel())
        for name, each, count in counted
        if count
    )
