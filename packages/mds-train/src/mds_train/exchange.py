"""Sums and small objects between ranks, and failures that all ranks learn of together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

__all__ = ["attempt_on_all", "gather_from_all", "sum_over"]

T = TypeVar("T")


def sum_over(value: Tensor, *, group: dist.ProcessGroup | None) -> Tensor:
    """Sum a tensor over a group; None is a group of one."""
    if group is not None:
        dist.all_reduce(value, group=group)
    return value


def gather_from_all(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def attempt_on_all(action: Callable[[], T]) -> list[T]:
    """Run an action on every rank; if it fails on one, raise that rank's error on all of them.

    Without this the others would wait in their next collective for a rank that is gone.

    Returns:
        Every rank's result, in rank order.
    """
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except (OSError, ValueError, RuntimeError) as caught:
        error = caught
    outcomes = gather_from_all((result, error))
    if error is not None:
        raise error
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [outcome for outcome, _ in outcomes]  # type: ignore[misc]
