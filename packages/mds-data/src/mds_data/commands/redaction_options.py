"""Options that say what private data is and what takes its place; shared by several commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MODES", "add_redaction_options", "add_rules"]

_KINDS = ("SECRET", "EMAIL", "IBAN", "CARD", "CRYPTO", "IP", "NATIONAL_ID", "PASSPORT", "PHONE")
MODES = ("placeholder", "mask", "pseudonym", "drop")


def add_redaction_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that redact texts on their way into a store."""
    group = parser.add_argument_group("private data, replaced before a text becomes tokens")
    group.add_argument(
        "--redact",
        nargs="?",
        choices=MODES,
        const="placeholder",
        metavar="MODE",
        help="replace it, as mds-data redact does, by placeholder, mask, pseudonym or drop "
        "(%(const)s)",
    )
    add_rules(group.add_argument, prefix="redact-")


def add_rules(add: Callable[..., Any], *, prefix: str) -> None:
    """Add what to replace and what may stay."""
    kinds = ", ".join(_KINDS)
    add(
        f"--{prefix}key-file",
        type=Path,
        metavar="F",
        help="key of pseudonyms, only for your eyes",
    )
    add(
        f"--{prefix}kinds",
        nargs="+",
        choices=_KINDS,
        metavar="K",
        help=f"only these of {kinds}",
    )
    add(
        f"--{prefix}keep-kinds",
        nargs="+",
        choices=_KINDS,
        default=[],
        metavar="K",
        help="all but these",
    )
    add(
        f"--{prefix}names",
        metavar="MODEL",
        help="names of persons too, as a spaCy model guesses them that is installed, or its folder "
        "(extra [names])",
    )
    add(
        f"--{prefix}allow",
        type=Path,
        metavar="F",
        help="values that may stay, one a line; * is any text",
    )
