"""Opens hostile files by every command of mds-train that takes a checkpoint; writes what happened.

    python training_doors.py FOLDER REPORT

Each path in FOLDER/paths.json goes through each door in this one process, which has limits of
memory and time of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mds_train.cli import main

SECONDS = 10
MEMORY = 12 * 2**30


class TooSlow(BaseException):
    """A door did not close in time."""


def doors(path: Path, folder: Path) -> dict[str, list[str]]:
    """The commands, each with a hostile checkpoint."""
    store, out = folder / "store", folder / "out"
    return {
        "generate": ["generate", str(path), "--prompt", "x"],
        "serve": ["serve", str(path), "--port", "0"],
        "evaluate": ["evaluate", "perplexity", str(path), "--data", str(store)],
        "finetune": ["finetune", str(path), "--data", str(store), "--output", str(out)],
        "resume": ["resume", str(path)],
        "report": ["report", str(path)],
        "run": ["run", str(path)],
        "plan": ["plan", str(path)],
    }


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(*_: object) -> None:
        raise TooSlow

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def open_by(argv: list[str]) -> dict[str, Any]:
    """What a command makes of it."""
    said, began = io.StringIO(), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with in_time(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code: object = main(argv)
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
        "seconds": time.monotonic() - began,
        "grown_mb": grown // 1024,
    }


def run(folder: Path, report: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(folder)
    open_by(["generate", str(folder / "missing"), "--prompt", "x"])  # what is imported is no growth
    with report.open("w") as file:
        for path in map(Path, json.loads((folder / "paths.json").read_text())):
            for door, argv in doors(path, folder).items():
                line = {"attack": path.name, "door": door, **open_by(argv)}
                file.write(json.dumps(line) + "\n")
                file.flush()


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
