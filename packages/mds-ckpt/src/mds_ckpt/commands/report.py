"""What the command line says of a conversion."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mds_ckpt.escape import printable

if TYPE_CHECKING:
    from mds_ckpt.conversion import Report

__all__ = ["say", "say_report"]


def say(line: str) -> None:
    """Print one line."""
    sys.stdout.write(f"{line}\n")


def say_report(report: Report) -> None:
    """Notes, losses, what was dropped, and the counts."""
    for note in report.notes:
        say(f"note: {printable(note, longest=2000)}")
    for loss in report.losses:
        say(f"lost: {printable(str(loss), longest=2000)}")
    for reason, count in report.dropped.items():
        say(f"dropped: {count} tensors, {printable(reason)}")
    verb = "would write" if report.dry_run else "wrote"
    say(
        f"{report.source_format} {printable(str(report.source))}: {report.num_read} tensors used, "
        f"each once; {verb} {report.num_written} to {report.target_format} "
        f"{printable(str(report.target))} ({report.nbytes:,} bytes)"
    )
