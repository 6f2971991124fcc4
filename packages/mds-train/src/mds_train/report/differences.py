"""In which settings runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["differences"]


def differences(
    settings: Sequence[Mapping[str, Mapping[str, Any]]],
) -> list[tuple[str, list[str]]]:
    """Settings that are not the same in all runs.

    Args:
        settings: Tables of each run.

    Returns:
        ``table.key`` and its value in each run, empty where it is not set.
    """
    flat = [
        {f"{table}.{key}": value for table, fields in each.items() for key, value in fields.items()}
        for each in map(_tables, settings)
    ]
    names = dict.fromkeys(name for each in flat for name in each)
    return [
        (name, [_shown(each.get(name)) for each in flat])
        for name in names
        if any(each.get(name) != flat[0].get(name) for each in flat)
    ]


def _tables(settings: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {key: value for key, value in settings.items() if isinstance(value, Mapping)}


def _shown(value: Any) -> str:
    return "" if value is None else str(value)
