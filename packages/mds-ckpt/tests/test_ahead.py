from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mds_ckpt.writers.ahead import Task, in_order


@pytest.mark.parametrize("jobs", [1, 3])
def test_results_come_in_order(jobs: int) -> None:
    tasks = [Task(1, lambda n=n: [n, -n]) for n in range(50)]

    found = list(in_order(tasks, jobs=jobs, most=7))

    assert found == [number for n in range(50) for number in (n, -n)]


def test_no_more_bytes_than_allowed_are_in_work() -> None:
    held, most, lock = [0], [0], threading.Lock()

    def work() -> list[int]:
        with lock:
            held[0] += 10
            most[0] = max(most[0], held[0])
        return [10]

    for nbytes in in_order([Task(10, work) for _ in range(40)], jobs=4, most=35):
        with lock:
            held[0] -= nbytes

    assert 10 < most[0] <= 40  # the one that is in use, and those that wait


def test_a_task_that_is_larger_than_the_bound_runs_alone() -> None:
    running: list[str] = []

    def tasks() -> Iterator[Task[str]]:
        yield Task(1, lambda: ["small"])
        yield Task(100, lambda: [*running, "large"])

    for result in in_order(tasks(), jobs=2, most=10):
        running += [result]

    assert running == ["small", "small", "large"]


def test_a_task_that_fails_ends_the_work() -> None:
    def fail() -> list[int]:
        raise ValueError("no such thing")

    tasks = [Task(1, lambda: [1]), Task(1, fail), Task(1, lambda: [3])]

    with pytest.raises(ValueError, match="no such thing"):
        list(in_order(tasks, jobs=2, most=10))
