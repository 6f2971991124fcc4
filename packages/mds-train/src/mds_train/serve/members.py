"""Reads the members of a JSON request, one by one, each with its type and its bounds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mds_train.serve.api_error import ApiError

__all__ = ["Members", "read_object"]


def read_object(body: bytes) -> Members:
    """The one JSON object of a body.

    Raises:
        ApiError: If it is none.
    """
    try:
        members = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "The body is not JSON.", code="invalid_json") from error
    if not isinstance(members, dict):
        raise ApiError(400, "The body must be one JSON object.", code="invalid_json")
    return Members(members)


class Members:
    """An object's members; null stands for a member that is left out."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self._members = members

    def get(self, name: str) -> Any:
        """A member as it came."""
        return self._members.get(name)

    def flag(self, name: str) -> bool:
        """True or false; false when left out."""
        value = self._members.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def whole(
        self, name: str, default: int | None, *, least: int, most: int | None = None
    ) -> int | None:
        """A whole number within bounds."""
        value = self._members.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        fits = isinstance(value, int) and not isinstance(value, bool)
        if not fits or value < least or (most is not None and value > most):
            bounds = f"of at least {least}" if most is None else f"between {least} and {most}"
            raise _wrong(name, f"a whole number {bounds}", value)
        return int(value)

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """A number within bounds."""
        value = self._members.get(name)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        if not fits or not least <= value <= most:
            raise _wrong(name, f"a number between {least:g} and {most:g}", value)
        return float(value)

    def strings(self, name: str, *, most: int) -> tuple[str, ...]:
        """A text or a list of them."""
        value = self._members.get(name)
        if value is None:
            return ()
        values = [value] if isinstance(value, str) else value
        fits = isinstance(values, list) and all(isinstance(each, str) for each in values)
        if not fits or len(values) > most or not all(values):
            raise _wrong(name, f"a text or up to {most} of them, none empty", value)
        return tuple(values)

    def refuse_unknown(
        self, *, known: Collection[str], ignored: Collection[str], unsupported: Sequence[str]
    ) -> None:
        """Refuse what would change the answer and is not understood.

        Args:
            known: members that are read.
            ignored: members that do not change the answer.
            unsupported: members that are refused if they are set.
        """
        for name, value in self._members.items():
            if name in known or name in ignored or value is None:
                continue
            if name in unsupported:
                if value in (False, [], {}, ""):
                    continue
                raise ApiError(400, f"{name} is not supported here; leave it out.", parameter=name)
            raise ApiError(400, f"Unknown member {name[:60]!r}; leave it out.", parameter=name[:60])


def _wrong(name: str, wanted: str, value: object) -> ApiError:
    shown = json.dumps(value)
    shown = shown if len(shown) <= 40 else f"{shown[:40]}..."
    return ApiError(400, f"{name} must be {wanted}, not {shown}.", parameter=name)
