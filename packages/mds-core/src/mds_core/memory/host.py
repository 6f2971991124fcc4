"""Keep what the backward pass needs in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["on_host"]

_LEAST = 1 << 12  # elements; moving less costs more than it frees


class _Moved(NamedTuple):
    """A tensor's copy in host memory and where it came from."""

    copy: Tensor
    device: torch.device


@contextlib.contextmanager
def on_host(*, active: bool = True) -> Iterator[None]:
    """Move tensors that autograd keeps to host memory, and back when the backward pass asks.

    Parameters stay where they are, and so do small tensors. Where the model computes on the CPU
    this copies within the same memory: results are equal, nothing is freed.

    Args:
        active: Whether to; else everything stays as it is.
    """
    if not active:
        yield
        return
    with saved_tensors_hooks(_to_host, _from_host):
        yield


def _to_host(kept: Tensor) -> Tensor | _Moved:
    base = kept if kept._base is None else kept._base
    if isinstance(base, nn.Parameter) or kept.numel() < _LEAST:
        return kept
    pinned = kept.device.type == "cuda"
    copy = torch.empty(kept.shape, dtype=kept.dtype, device="cpu", pin_memory=pinned)
    # The stream that computes also copies, so the tensor's memory is reused only afterwards.
    copy.copy_(kept, non_blocking=pinned)
    return _Moved(copy, kept.device)


def _from_host(kept: Tensor | _Moved) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.copy.to(kept.device, non_blocking=kept.copy.is_pinned())
