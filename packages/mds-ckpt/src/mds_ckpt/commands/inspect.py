"""The command that shows what a checkpoint is."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from mds_ckpt.commands.report import say
from mds_ckpt.escape import printable

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource

__all__ = ["show", "show_sources"]


def show(
    path: str,
    *,
    source_format: str | None = None,
    pattern: str | None = None,
    stats: bool = False,
    as_json: bool = False,
    key: KeySource | None = None,
    expect: str | None = None,
) -> int:
    """Print what is at ``path``, as a tree or as JSON; returns the exit code."""
    from mds_ckpt.formats import open_checkpoint
    from mds_ckpt.inspection import summary

    checkpoint = open_checkpoint(path, format=source_format, key=key, expect=expect)
    found = summary(checkpoint, pattern=pattern, stats=stats)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
        return 0
    from rich.console import Console

    from mds_ckpt.inspection_tree import draw, statistics_table

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:  # rich's own ends with 1, which means a difference here
            raise BrokenPipeError

    # Wide enough when piped that no line breaks.
    console = PipedConsole(highlight=False, width=None if sys.stdout.isatty() else 240)
    console.print(draw(found))
    if pattern and not found["tensors"]:
        say(f"no tensor has a name like '{printable(pattern)}'")
    if stats:
        console.print(statistics_table(found["tensors"]))
    return 0


def show_sources(
    path: str,
    *,
    source_format: str | None = None,
    as_json: bool = False,
    key: KeySource | None = None,
    expect: str | None = None,
) -> int:
    """Print what the checkpoint at ``path`` was made of; returns the exit code."""
    from mds_ckpt.formats import open_checkpoint
    from mds_ckpt.sources import recorded_sources, source_lines

    found = recorded_sources(open_checkpoint(path, format=source_format, key=key, expect=expect))
    if as_json:
        sys.stdout.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
        return 0
    for line in source_lines(found):
        sys.stdout.write(printable(line) + "\n")
    return 0
