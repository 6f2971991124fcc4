"""Where a command's work is done: this machine, a Ray cluster, or one task of a job array."""

from __future__ import annotations

import argparse
import os

from mds_data.commands.errors import UsageError
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.task import Task, parse_task

__all__ = ["chosen_engine", "chosen_task", "default_workers"]

_MOST_WORKERS = 16


def chosen_task(arguments: argparse.Namespace) -> Task | None:
    """Return the task that ``--task`` names; None without it.

    Raises:
        UsageError: It is misspelt.
    """
    try:
        return None if arguments.task is None else parse_task(arguments.task)
    except ValueError as error:
        raise UsageError(str(error)) from error


def chosen_engine(arguments: argparse.Namespace) -> Engine:
    """Return where the work is done.

    Raises:
        UsageError: The options don't go together.
    """
    if arguments.engine == "ray":
        from mds_data.preprocess.ray_engine import RayEngine

        return RayEngine(address=arguments.address, tasks=arguments.workers)
    if arguments.address is not None:
        raise UsageError("--address is that of a Ray cluster; say --engine ray too.")
    try:
        workers = default_workers() if arguments.workers is None else arguments.workers
        return LocalEngine(workers=workers)
    except ValueError as error:
        raise UsageError(str(error)) from error


def default_workers() -> int:
    """The cores that this process may use, up to a number that still gains."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)
