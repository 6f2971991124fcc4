"""What is left of the arguments of a command."""

from __future__ import annotations

from mds_train.errors import UsageError

__all__ = ["no_more"]


def no_more(rest: list[str]) -> None:
    """Refuse arguments that the command does not know."""
    if rest:
        raise UsageError(f"Unknown argument {rest[0]!r}; see --help.")
