"""What brings a run to an early save or to its end; what one rank knows brings all to it together.

SIGTERM and SIGINT save and end, SIGUSR1 saves and goes on; so do a kill-switch file and a time
limit end a run. The ranks agree once after every step, in one small collective.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

__all__ = ["SIGNALS", "Agreement", "Interruption", "Limits"]

_SAVE_SIGNALS = (signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ()
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SIGNALS = (*_END_SIGNALS, *_SAVE_SIGNALS)
_IMPATIENCE = 3
"""A person who types Ctrl-C so many times wants no save; launchers pass it on up to twice."""

_KILL_SWITCH, _TIME_LIMIT = 1000, 1001
_REASONS = {_KILL_SWITCH: "kill-switch", _TIME_LIMIT: "time-limit"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """What all ranks do next."""

    end: str | None
    """Why the run ends: the name of a signal, "kill-switch" or "time-limit"; None to go on."""

    save: str | None
    """Why to save now: the name of a signal or "minutes"; None if nothing asks for it."""

    work_is_done: bool
    """No rank's background work is unfinished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """When to end or to save, besides signals."""

    kill_switch: Path | None = None
    exit_minutes: float | None = None
    save_minutes: float | None = None


class Interruption:
    """While open, notes signals instead of dying of them.

    Args:
        device: Where the ranks' collectives take place.
        limits: What else ends or saves; rank 0 looks at it for all.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._limits = limits or Limits()
        self._clock = clock
        self._began = self._saved = clock()
        self._end = 0
        self._save = 0
        self._keyboard = 0
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
        if number in _SAVE_SIGNALS:
            self._save = number
            return
        self._end = self._end or number  # a second one must not disturb the save
        self._keyboard += number == signal.SIGINT
        if self._keyboard >= _IMPATIENCE:
            raise KeyboardInterrupt

    def note_save(self) -> None:
        """The time to the next save by minutes begins now; what a signal asked for is done."""
        self._saved = self._clock()

    def agreed(self, *, working: bool = False) -> Agreement:
        """What any rank was asked for, on all ranks. Collective.

        Args:
            working: This rank's threads have not finished their part of a save.
        """
        end, save = self._end or self._reached(), self._save or self._minutes_are_over()
        self._save = 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            highest = torch.tensor([end, save, working], dtype=torch.int32, device=self._device)
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
            end, save, unfinished = (int(value) for value in highest.tolist())
            working = bool(unfinished)
        return Agreement(
            end=_name(end),
            save=("minutes" if save == _TIME_LIMIT else _name(save)),
            work_is_done=not working,
        )

    def _reached(self) -> int:
        """Rank 0's clock and its view of the file system count."""
        if not _is_first():
            return 0
        limits = self._limits
        if limits.kill_switch is not None and limits.kill_switch.exists():
            return _KILL_SWITCH
        passed = (self._clock() - self._began) / 60
        return (
            _TIME_LIMIT if limits.exit_minutes is not None and passed >= limits.exit_minutes else 0
        )

    def _minutes_are_over(self) -> int:
        minutes = self._limits.save_minutes
        if minutes is None or not _is_first():
            return 0
        return _TIME_LIMIT if (self._clock() - self._saved) / 60 >= minutes else 0


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _name(code: int) -> str | None:
    if not code:
        return None
    return _REASONS.get(code) or signal.Signals(code).name
