"""Small checks that the configuration tables share. Each raises ValueError with one sentence."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["require_choice", "require_not_negative", "require_positive"]


def require_positive(key: str, value: float | None) -> None:
    """Refuse zero and negative numbers; None means "not set" and passes."""
    if value is not None and not value > 0:
        raise ValueError(f"{key} is {value}, but it must be greater than 0.")


def require_not_negative(key: str, value: float | None) -> None:
    """Refuse negative numbers; None means "not set" and passes."""
    if value is not None and not value >= 0:
        raise ValueError(f"{key} is {value}, but it must not be negative.")


def require_choice(key: str, value: str, *, choices: Collection[str]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{key} is {value!r}, but it must be one of {', '.join(choices)}.")
