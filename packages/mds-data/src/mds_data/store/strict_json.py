"""Strict JSON metadata: no duplicate keys, bounded numbers, and paths that stay in the store."""

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from mds_data.errors import ManifestError

__all__ = ["Members", "check_relative_path", "parse_json", "quick_file_record"]

_LARGEST = 2**62
_HEX64 = re.compile(r"[0-9a-f]{64}")
_PART = r'(?!\.{1,2}(?:/|$))[^\x00-\x1f\x7f\\:*?"<>|/]+'
_SAFE_PATH = re.compile(f"{_PART}(?:/{_PART})*")


def parse_json(data: bytes, *, name: str) -> dict[str, Any]:
    """Read one JSON object strictly: UTF-8, no duplicate keys, no NaN, bounded depth.

    Raises:
        ManifestError: with ``name`` and the reason.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which JSON does not know")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice[:100]!r} stands twice")
        return members

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ManifestError(f"{name}: is nested too deeply to be a store's metadata") from None
    except ValueError as error:
        raise ManifestError(f"{name}: is not valid JSON metadata: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{name}: must hold one JSON object, not {type(value).__name__}")
    return value


def check_relative_path(path: str, *, name: str) -> str:
    """Return ``path`` if it stays inside the store's folder on every system, else raise."""
    if _SAFE_PATH.fullmatch(path) and len(path) <= 1024:
        return path
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise ManifestError(f"{name}: the path {path[:100]!r} leaves the store's folder")
    raise ManifestError(f"{name}: the path {path[:100]!r} holds characters that no store uses")


def quick_file_record(path: str, record: object) -> tuple[int, str] | None:
    """Size and SHA-256 of a file in a manifest; None if anything is wrong with it.

    A store of a thousand shards has a thousand of these, and asking member by member would take
    most of the time of opening it.
    """
    if type(record) is not dict:
        return None
    size, digest = record.get("size"), record.get("sha256")
    if type(size) is not int or not 0 <= size <= _LARGEST or len(path) > 1024:
        return None
    if type(digest) is not str or not _HEX64.fullmatch(digest) or not _SAFE_PATH.fullmatch(path):
        return None
    return size, digest


class Members:
    """Typed access to one JSON object; every complaint names the file and the member."""

    def __init__(self, value: object, *, name: str, where: str = "") -> None:
        self._name = name
        self._where = where
        if not isinstance(value, dict):
            self.fail("", f"must be an object, not {type(value).__name__}")
        self._value: dict[str, Any] = value

    def fail(self, member: str, reason: str) -> NoReturn:
        """Refuse the file because of a member."""
        place = ".".join(part for part in (self._where, member) if part) or "the top level"
        raise ManifestError(f"{self._name}: {place} {reason}")

    def has(self, member: str) -> bool:
        """Whether a member is there and not null."""
        return self._value.get(member) is not None

    def raw(self, member: str) -> Any:
        """A member as it is; it must be there."""
        if member not in self._value:
            self.fail(member, "is missing")
        return self._value[member]

    def text(self, member: str, *, limit: int = 4096) -> str:
        """A string of bounded length."""
        value = self.raw(member)
        if not isinstance(value, str) or len(value) > limit:
            self.fail(member, f"must be a string of at most {limit} characters")
        return value

    def digest(self, member: str) -> str:
        """A SHA-256 in hex digits."""
        value = self.text(member)
        if not _HEX64.fullmatch(value):
            self.fail(member, "must be a SHA-256 in 64 lower-case hex digits")
        return value

    def integer(self, member: str, *, low: int = 0, high: int = _LARGEST) -> int:
        """A whole number inside bounds; true, false and 1.0 are none."""
        value = self.raw(member)
        if type(value) is not int or not low <= value <= high:
            self.fail(member, f"must be a whole number from {low} to {high}")
        return value

    def optional_integer(self, member: str) -> int | None:
        """A whole number, or None if the member is missing or null."""
        return self.integer(member) if self.has(member) else None

    def optional_text(self, member: str) -> str | None:
        """A string, or None if the member is missing or null."""
        return self.text(member) if self.has(member) else None

    def choice(self, member: str, options: Sequence[str]) -> str:
        """One of a few strings."""
        value = self.raw(member)
        if value not in options:
            self.fail(member, f"must be one of {', '.join(options)}, not {str(value)[:60]!r}")
        return str(value)

    def child(self, member: str) -> "Members":
        """An object inside this one."""
        return Members(self.raw(member), name=self._name, where=self._place(member))

    def children(self, member: str) -> list["Members"]:
        """A list of objects; empty if the member is missing."""
        values = self._value.get(member, [])
        if not isinstance(values, list):
            self.fail(member, "must be a list")
        place = self._place(member)
        return [
            Members(value, name=self._name, where=f"{place}[{index}]")
            for index, value in enumerate(values)
        ]

    def path(self, member: str) -> str:
        """A path that stays inside the store's folder."""
        return check_relative_path(self.text(member), name=self._name)

    def _place(self, member: str) -> str:
        return f"{self._where}.{member}" if self._where else member
