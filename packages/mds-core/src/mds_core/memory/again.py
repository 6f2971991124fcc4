"""Compute something again in the backward pass instead of keeping what it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

__all__ = ["again"]

Result = TypeVar("Result")


def again(function: Callable[..., Result], *arguments: Any, active: bool = True) -> Result:
    """Call ``function``, keeping its arguments only; the backward pass calls it once more.

    The second call ends at the last tensor that the backward pass needs, so a matrix product at the
    end of ``function`` is not repeated.

    Args:
        function: What to compute; tensors among its arguments and results may need gradients.
        *arguments: Its arguments.
        active: Whether to; else, and where no gradients are asked for, it is simply called.
    """
    if not active or not torch.is_grad_enabled():
        return function(*arguments)
    # Dropout masks are functions of sample and position: there is no generator state to preserve.
    return checkpoint(  # type: ignore[no-any-return]
        function, *arguments, use_reentrant=False, preserve_rng_state=False
    )
