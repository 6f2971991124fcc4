"""The console that commands print on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console_of"]


def console_of(rank: int, *, stderr: bool = False) -> Console:
    """Rank 0's console; the others' is quiet."""
    from rich.console import Console

    class PatientConsole(Console):
        """A run goes on when whoever read its output has gone; its logs have it all."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    return PatientConsole(stderr=stderr, highlight=False, quiet=rank != 0)
