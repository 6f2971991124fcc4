"""Opens hostile files by every command that takes somebody else's; writes what happened.

    python open_doors.py FOLDER REPORT EVERY

Each path in FOLDER/paths.json goes through each door in this one process, which has limits of
memory and time of its own; or one of EVERY such meetings does.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doors import Door, doors

HANGS = 60
"""Seconds by the clock, which a busy machine stretches."""
MEMORY = 12 * 2**30


MADE = ("out", "place", "a-run", "signing.pem", "signing.pem.pub", "page.html", "croissant.json")
"""What the doors write."""


class TooSlow(BaseException):
    """A door did not close in time."""


def tidy(folder: Path) -> None:
    """Remove what a command made."""
    for name in MADE:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, late)
    signal.alarm(HANGS)
    try:
        yield
    finally:
        signal.alarm(0)


def open_by(door: Door) -> dict[str, Any]:
    """What a command makes of it."""
    said, began = io.StringIO(), time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with in_time(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code: object = importlib.import_module(door.module).main(list(door.argv))
    except TooSlow:
        code = "too slow"
    except SystemExit as stop:
        code = stop.code
    except BaseException as error:  # noqa: BLE001 - a door that breaks is what is looked for
        code = repr(error)[:200]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "code": code,
        "said": said.getvalue(),
        "cpu_seconds": time.process_time() - began,
        "grown_mb": grown // 1024,
    }


def meetings(folder: Path, *, every: int) -> Iterator[tuple[Path, Door]]:
    """Who meets whom: every file every command, or some of both."""
    paths = map(Path, json.loads((folder / "paths.json").read_text()))
    both = ((path, door) for path in paths for door in doors(path, folder))
    for path, door in itertools.islice(both, 0, None, every):
        if not (door.waits and stat.S_ISFIFO(path.lstat().st_mode)):
            yield path, door


def run(folder: Path, report: Path, *, every: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    for door in doors(folder / "missing", folder):  # what is imported is no growth
        open_by(door)
    with report.open("w") as file:
        for path, door in meetings(folder, every=every):
            line = {"attack": path.name, "door": door.name, "lax": door.lax, **open_by(door)}
            tidy(folder)
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), every=int(sys.argv[3]))
