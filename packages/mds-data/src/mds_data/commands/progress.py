"""Show how far a command is: one moving line on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

__all__ = ["ProgressLine", "megabytes", "timespan"]

_MOVING = 0.1
_PLAIN = 10.0


class ProgressLine:
    """Prints share, amount, rate and the time that is left.

    Args:
        stream: Where to print, stderr as a rule.
        label: What is going on.
        unit: What is counted: ``B`` for bytes, else a word.
        clock: Seconds that only grow.
        every: Print a plain line each time so many items were done, instead of every 10 seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        label: str,
        unit: str = "B",
        clock: Callable[[], float] = time.monotonic,
        every: int | None = None,
    ) -> None:
        self._stream = stream
        self._label = label
        self._unit = unit
        self._clock = clock
        self._every = every
        self._moving = stream.isatty()
        self._started = self._printed = clock()
        self._printed_items = 0
        self._width = 0

    def update(self, done: int, total: int, *, items: int = 0, detail: str = "") -> None:
        """Print the state if it is time to."""
        now = self._clock()
        if not self._is_time(now, items):
            return
        self._printed, self._printed_items = now, items
        self._print(self._text(done, total, seconds=now - self._started, detail=detail))

    def finish(self, text: str) -> None:
        """Print the last line."""
        self._print(f"{self._label}: {text}")
        if self._moving:
            self._stream.write("\n")
        self._stream.flush()

    def _is_time(self, now: float, items: int) -> bool:
        if self._moving:
            return now - self._printed >= _MOVING
        if self._every is not None:
            return items - self._printed_items >= self._every
        return now - self._printed >= _PLAIN

    def _text(self, done: int, total: int, *, seconds: float, detail: str) -> str:
        parts = [
            f"{self._label}: {100 * done // total if total else 100:3d} %",
            self._amount(done, total),
        ]
        if seconds > 0:
            parts.append(self._rate(done / seconds))
        if detail:
            parts.append(detail)
        if 0 < done < total:
            parts.append(f"ETA {timespan(seconds * (total - done) / done)}")
        return "  ".join(parts)

    def _amount(self, done: int, total: int) -> str:
        if self._unit == "B":
            return f"{megabytes(done)} of {megabytes(total)} MB"
        return f"{done:,} of {total:,} {self._unit}"

    def _rate(self, rate: float) -> str:
        return f"{rate / 1e6:.2f} MB/s" if self._unit == "B" else f"{rate:,.0f} {self._unit}/s"

    def _print(self, text: str) -> None:
        if self._moving:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()


def megabytes(count: int) -> str:
    """Return a number of bytes in MB, one digit after the point."""
    return f"{count / 1e6:,.1f}"


def timespan(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``."""
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
