"""Pieces of work beside one another, within a bound of bytes."""

from __future__ import annotations

import threading

import pytest

from mds_ckpt.writers.beside import Task, side_by_side


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_task_is_done_once(jobs: int) -> None:
    done: list[int] = []

    side_by_side([Task(1, lambda n=n: done.append(n)) for n in range(50)], jobs=jobs, most=7)

    assert sorted(done) == list(range(50))


def test_no_more_bytes_than_allowed_are_in_work() -> None:
    """Three tasks of 10 bytes fit into 35; each waits for the others, so three do run at a time."""
    held, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(3, timeout=20)

    def work() -> None:
        with lock:
            held[0] += 10
            most[0] = max(most[0], held[0])
        together.wait()
        with lock:
            held[0] -= 10

    side_by_side([Task(10, work) for _ in range(39)], jobs=8, most=35)

    assert most[0] == 30


def test_a_task_that_is_larger_than_the_bound_runs_alone() -> None:
    running: list[str] = []
    seen: list[tuple[str, ...]] = []

    def work(name: str) -> None:
        running.append(name)
        seen.append(tuple(running))
        running.remove(name)

    names = ["small", "large", "small"]
    tasks = [Task(100 if name == "large" else 1, lambda name=name: work(name)) for name in names]
    side_by_side(tasks, jobs=3, most=10)

    assert seen == [("small",), ("large",), ("small",)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_nothing_begins_behind_a_task_that_fails(jobs: int) -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        side_by_side([Task(10, lambda n=n: work(n)) for n in range(50)], jobs=jobs, most=10)

    assert begun == [0, 1]
