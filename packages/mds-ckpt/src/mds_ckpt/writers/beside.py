"""Pieces of work beside one another, within a bound of the bytes that they hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

__all__ = ["Task", "side_by_side"]


@dataclass(frozen=True, slots=True)
class Task:
    """A piece of work, and the bytes that it holds at most until it is done."""

    nbytes: int
    work: Callable[[], None]


def side_by_side(tasks: Iterable[Task], *, jobs: int, most: int) -> None:
    """Do all tasks. The first that fails ends it: those that run are waited for, no other begins.

    Args:
        tasks: What is to be done, begun in this order.
        jobs: Tasks that are done at a time.
        most: Bytes that they may hold together, except one that holds more alone.
    """
    if jobs == 1:
        for task in tasks:
            task.work()
        return
    running: dict[Future[None], int] = {}
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for task in tasks:
            while running and (len(running) >= jobs or sum(running.values()) + task.nbytes > most):
                _settle(running)
            running[pool.submit(task.work)] = task.nbytes
        while running:
            _settle(running)


def _settle(running: dict[Future[None], int]) -> None:
    """Wait for at least one of them and forget what is done; raises what it raised."""
    for done in wait(running, return_when=FIRST_COMPLETED).done:
        del running[done]
        done.result()
