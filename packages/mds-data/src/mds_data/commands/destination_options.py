"""How an output on object storage is named on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["add_staging", "place", "url_member"]


def place(text: str) -> Path | str:
    """Return a path, or a URL as it is: a path would lose one of its slashes."""
    return text.rstrip("/") if "://" in text else Path(text)


def add_staging(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option that says where an output is made that goes to a URL."""
    parser.add_argument(
        "--staging",
        type=Path,
        metavar="FOLDER",
        help="where an output is made that then goes to a URL such as s3://bucket/store "
        "(a folder NAME.staging in this one)",
    )


def url_member(arguments: argparse.Namespace) -> str | None:
    """Return the argument by which a command's output is to lie at a URL, if it is."""
    if not hasattr(arguments, "staging"):
        return None
    names = ("output", "output_prefix")
    return next((name for name in names if isinstance(getattr(arguments, name, None), str)), None)
