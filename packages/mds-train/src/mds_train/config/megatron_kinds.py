"""The kinds of Megatron's flags: what a flag of the original may become here.

A field, a warning that it does nothing and why, or an error that says what to write instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Derived", "Ignored", "Many", "OldFlag", "Only", "Refused", "Switch", "Value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OldFlag:
    """One flag of the original."""

    names: tuple[str, ...]
    prevails: bool = False
    """Counts more than other flags that set the same field, wherever they stand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Value(OldFlag):
    """Takes one value, which goes into ``key``."""

    key: str
    convert: Callable[[str], str] | None = None
    """Rewrites the text first; None takes it as it is."""
    note: str = ""
    """A warning, where the new meaning is not quite the old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch(OldFlag):
    """Takes no value and sets fields."""

    values: Mapping[str, Any]
    against: str = ""
    """The flag that it contradicts."""
    note: str = ""
    """A warning, where the new meaning is not quite the old one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived(OldFlag):
    """Takes numbers that are meaningful only together with other settings."""

    key: str
    needs: tuple[str, ...]
    """Keys; "a|b" is the first of the two that is set, "a?" is None where it is not set."""
    compute: Callable[..., Any]
    """Called with the number and the needed settings' values; gives the field's value, or the
    values of several fields by name."""
    several: bool = False
    """It takes one number or more; `compute` gets a tuple of them."""
    smallest: bool = False
    """Of several flags that set the field, the smallest value counts, not the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ignored(OldFlag):
    """Does nothing here; a warning says why."""

    reason: str
    takes_value: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Only(OldFlag):
    """Takes one value, and what it must be is how things are here; any other is an error."""

    allowed: tuple[str, ...]
    instead: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused(OldFlag):
    """Would change what is computed, so it is an error that says what to write instead."""

    instead: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Many(OldFlag):
    """Takes several values, as `--data-path 0.3 a 0.7 b`."""

    read: Callable[[Sequence[str]], Mapping[str, Any]]
    """Gives the fields that the values set; raises ValueError, whose text ends a sentence."""
