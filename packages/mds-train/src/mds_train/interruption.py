"""Signals that ask a run to save and end; one rank that got one brings all to the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

__all__ = ["SIGNALS", "Interruption"]

SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    *((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()),
)


class Interruption:
    """While open, notes SIGTERM, SIGINT and SIGUSR1 instead of dying of them.

    Args:
        device: Where the ranks' collectives take place.
    """

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._received = 0
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread install handlers; elsewhere the caller keeps them.
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._received = self._received or number  # a second one must not disturb the save

    def agreed(self) -> str | None:
        """Name of a signal that any rank received, on all ranks; None if none did. Collective."""
        number = self._received
        if dist.is_initialized() and dist.get_world_size() > 1:
            highest = torch.tensor(number, dtype=torch.int32, device=self._device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            number = int(highest.item())
        return signal.Signals(number).name if number else None
