"""List every command and flag of the five command lines, one line each.

    python tests/cli/commands.py > tests/cli/commands.txt

The list is frozen: a new flag is a decision, not an accident, and shows in the diff of that file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator

PROGRAMS = {
    "mds-ckpt": "mds_ckpt.cli",
    "mds-data": "mds_data.cli",
    "mds-kernels": "mds_kernels.cli",
    "mds-train": "mds_train.cli",
}


def describe(action: argparse.Action) -> str:
    """Return one argument as a usage line shows it."""
    if action.option_strings:
        name = "|".join(sorted(action.option_strings, key=len))
        return f"[{name}]" if not action.required else name
    return str(action.metavar or action.dest)


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[str]:
    """Yield a line for ``parser``, or for each of its sub-commands."""
    children = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    own = [a for a in parser._actions if a not in children and a.dest != "help"]
    positional = [describe(a) for a in own if not a.option_strings]
    flags = sorted(describe(a) for a in own if a.option_strings)
    if not children or flags:
        yield " ".join([name, *positional, *flags])
    for child in children:
        for word, inner in sorted(child.choices.items()):
            yield from commands(inner, f"{name} {word}")


def everything() -> list[str]:
    """Return the lines of all programs."""
    lines: list[str] = []
    for program, module in PROGRAMS.items():
        lines += commands(importlib.import_module(module).build_parser(), program)
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join(everything()) + "\n")
