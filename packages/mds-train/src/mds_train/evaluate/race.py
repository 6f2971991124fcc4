"""RACE from its published files: which of four answers does the article support?"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_train.errors import InputError

__all__ = ["Question", "read_race"]

_LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class Question:
    """A question about an article."""

    article: str
    statements: tuple[str, ...]
    """The question with each of the answers."""
    right: int
    """The number of the right one."""


def read_race(paths: Sequence[Path]) -> list[Question]:
    """Read folders with files as RACE publishes them (train/middle, dev/high ...), or such files.

    Raises:
        InputError: If there is none, or one is not of this form.
    """
    files = [file for path in paths for file in _files(path)]
    found = [question for file in files for question in _questions(file)]
    if not found:
        raise InputError(f"{', '.join(map(str, paths))}: there is no question in it.")
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*.txt") if file.is_file())


def _questions(file: Path) -> Iterator[Question]:
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not a text in UTF-8.") from error
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            try:
                yield from _of_article(json.loads(line))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise InputError(
                    f"{file}, line {number}: not an article of RACE with questions, options and "
                    "answers; take its files as they are published."
                ) from error


def _of_article(members: dict[str, Any]) -> Iterator[Question]:
    article = " ".join(members["article"].split())
    rows = zip(members["questions"], members["options"], members["answers"], strict=True)
    for question, options, letter in rows:
        if len(options) != len(_LETTERS):
            raise ValueError("a question has four answers")
        statements = tuple(_statement(question, option) for option in options)
        yield Question(article, statements, _LETTERS.index(letter))


def _statement(question: str, option: str) -> str:
    """A blank is filled, a question is followed by its answer."""
    joined = question.replace("_", option) if "_" in question else f"{question} {option}"
    return " ".join(joined.split())
