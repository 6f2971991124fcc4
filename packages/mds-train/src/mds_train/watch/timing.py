"""How long each part of a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["PhaseTimer"]


class PhaseTimer:
    """Counts the seconds between the places that a step passes.

    Args:
        settle: Called before the clock is read; where an accelerator works behind the program's
            back, it waits for it.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        *,
        settle: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._settle = settle
        self._clock = clock
        self._phase = ""
        self._since = 0.0
        self._seconds: dict[str, float] = {}

    def at(self, phase: str) -> None:
        """A new part begins, and so the last one ends."""
        self._end()
        self._phase = phase

    def taken(self) -> dict[str, float]:
        """Seconds of each part since the last call; the last part ends now."""
        self._end()
        self._phase = ""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _end(self) -> None:
        self._settle()
        now = self._clock()
        if self._phase:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
