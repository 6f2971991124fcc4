"""The nearest known word to one that is not known."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"``, or nothing if no known word is near.

    >>> did_you_mean("inspekt", ["inspect", "verify"])
    '; did you mean inspect?'
    """
    from difflib import get_close_matches

    nearest = get_close_matches(word, list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
