"""Prompts from the command line or a file, and answers into one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from mds_train.errors import InputError

__all__ = ["read_prompts"]


def read_prompts(path: Path) -> Iterator[str]:
    """Prompts of a file: the lines of a text, or the member "prompt" of each line of JSON.

    In a text, a backslash and an n stand for the end of a line. Empty lines are left out.

    Args:
        path: a .jsonl file, or any other name for a text.

    Raises:
        InputError: If a line is no such object, or not UTF-8.
    """
    as_json = path.suffix == ".jsonl"
    with path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, start=1):
                text = line.rstrip("\r\n")
                if text.strip():
                    yield _member(path, number, text) if as_json else text.replace("\\n", "\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: not a text in UTF-8; convert it first.") from error


def _member(path: Path, number: int, line: str) -> str:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON; write one object a line.") from error
    prompt = members.get("prompt") if isinstance(members, dict) else None
    if not isinstance(prompt, str):
        raise InputError(
            f'{path}, line {number}: there is no text "prompt"; write {{"prompt": "..."}}.'
        )
    return prompt
