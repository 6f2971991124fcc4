"""The part of the input that one task of a job array works on: neighbouring files, like in size."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mds_data.preprocess.inputs import InputError, InputFile

__all__ = ["Task", "parse_task", "task_files", "task_path", "task_places", "task_stretch"]

_PACKED = {".gz", ".bz2", ".xz"}
_SPELLING = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class Task:
    """Task ``number`` of ``count``, counted from 1."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"task {self}: tasks are counted from 1 to their number.")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def suffix(self) -> str:
        """What is put after an output's name, so that names sort as the tasks do."""
        width = len(str(self.count))
        return f".task-{self.number:0{width}}-of-{self.count}"


def parse_task(text: str) -> Task:
    """Return the task that ``I/N`` spells.

    Raises:
        ValueError: It is spelled another way.
    """
    match = _SPELLING.fullmatch(text)
    if match is None:
        raise ValueError(f"a task is spelled I/N, such as 3/8, not {text!r}.")
    return Task(int(match[1]), int(match[2]))


def task_path(path: Path, task: Task | None) -> Path:
    """Return the name of a task's own part of a file: ``clean.task-2-of-8.jsonl.gz``."""
    if task is None:
        return path
    stem, *endings = path.name.rsplit(".", 2 if path.suffix in _PACKED else 1)
    return path.with_name(".".join([f"{stem}{task.suffix()}", *endings]))


def task_stretch(count: int, task: Task | None) -> range:
    """Return the numbers, of 0 to ``count`` - 1, that belong to a task."""
    if task is None:
        return range(count)
    return range((task.number - 1) * count // task.count, task.number * count // task.count)


def task_places(tasks: Sequence[Task], *, names: Sequence[object]) -> list[int]:
    """Return the places of one job array's tasks, in their order.

    Args:
        tasks: As they were found.
        names: Where each was found, for the message.

    Raises:
        InputError: A task is missing, stands there twice, or is of another job array.
    """
    counts = {task.count for task in tasks}
    numbers = [task.number for task in tasks]
    wanted = set(range(1, max(counts, default=1) + 1))
    if len(counts) == 1 and len(numbers) == len(wanted) and set(numbers) == wanted:
        return sorted(range(len(tasks)), key=numbers.__getitem__)
    missing = sorted(wanted - set(numbers))
    if len(counts) > 1:
        what = "they are of different job arrays"
    else:
        what = f"task {missing[0]} is missing" if missing else "a task stands there twice"
    raise InputError(f"{', '.join(map(str, names))}: {what}; give what every task wrote, once.")


def task_files(files: Sequence[InputFile], task: Task | None) -> list[InputFile]:
    """Return the files of one task; those of all tasks, in order, are all files once.

    Raises:
        InputError: There are more tasks than files.
    """
    if task is None:
        return list(files)
    if task.count > len(files):
        raise InputError(
            f"there are {task.count} tasks and {len(files)} input files, and a file is not shared; "
            f"start at most {len(files)} tasks, or cut the files into smaller ones."
        )
    borders = _borders([file.size + 1 for file in files], parts=task.count)
    return list(files[borders[task.number - 1] : borders[task.number]])


def _borders(sizes: Sequence[int], *, parts: int) -> list[int]:
    """Return where each part begins and the last one ends; none is empty."""
    total = sum(sizes)
    borders, done, number = [0], 0, 0
    for part in range(1, parts):
        latest = len(sizes) - (parts - part)
        while number < latest and (
            number == borders[-1] or done + sizes[number] / 2 <= part * total / parts
        ):
            done += sizes[number]
            number += 1
        borders.append(number)
    return [*borders, len(sizes)]
