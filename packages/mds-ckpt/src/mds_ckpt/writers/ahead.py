"""Work that other threads do ahead of the one that writes, in order and within a bound of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Task", "in_order"]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Task(Generic[Item]):
    """A piece of work, and the bytes that it holds until its result is used."""

    nbytes: int
    work: Callable[[], Iterable[Item]]


def in_order(tasks: Iterable[Task[Item]], *, jobs: int, most: int) -> Iterator[Item]:
    """The results of tasks, one after the other.

    Args:
        tasks: What is to be done.
        jobs: Threads that work ahead; with 1 nothing is done before it is asked for.
        most: Bytes that tasks may hold together, except one that holds more alone.
    """
    if jobs == 1:
        for task in tasks:
            yield from task.work()
        return
    waiting: deque[tuple[int, Future[Iterable[Item]]]] = deque()
    held = 0
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        for task in tasks:
            while waiting and held + task.nbytes > most:
                nbytes, first = waiting.popleft()
                yield from first.result()
                held -= nbytes
            waiting.append((task.nbytes, pool.submit(task.work)))
            held += task.nbytes
        for _, last in waiting:
            yield from last.result()
