"""Parse JSON from untrusted files: no duplicate keys, no NaN, bounded size, depth and count."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mds_ckpt.escape import printable


class JsonError(ValueError):
    """The text is not the JSON we accept; the message says why, without naming the file."""


def parse(data: bytes, *, most_containers: int = 20_000_000) -> Any:
    """The value that ``data`` holds.

    Args:
        data: UTF-8 text of one JSON value.
        most_containers: Objects and arrays allowed; counted before parsing, since each takes far
            more memory than the two bytes that ask for it.

    Raises:
        JsonError: For anything but strict JSON within the bounds.
    """
    containers = data.count(b"{") + data.count(b"[")
    if containers > most_containers:
        raise JsonError(f"it has {containers} objects and arrays, and {most_containers} are read")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError(f"it is not UTF-8 at byte {error.start}") from None
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise JsonError("it is nested too deeply") from None
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"it is not JSON ({error})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise JsonError(f"key '{printable(_repeated(pairs))}' stands twice in one object")
    return members


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key stands twice")


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number")
