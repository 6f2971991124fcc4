"""Reads settings that a person wrote: TOML, small, and not nested without measure."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from mds_data.errors import DataError

__all__ = ["read_small_toml"]

_LARGEST_FILE = 2**20
_MOST_DOTS = 200


def read_small_toml(path: Path) -> dict[str, Any]:
    """What a TOML file holds.

    Raises:
        DataError: It is none, has over 1 MiB, or is nested too deeply.
    """
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise DataError(f"{path}: has more than {_LARGEST_FILE} bytes, as no settings have")
    try:
        text = data.decode()
        # The parser's time grows with the square of a key's length in parts.
        if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines()):
            raise DataError(f"{path}: a line of it names a key in more than {_MOST_DOTS} parts")
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: is not a TOML file: {error}") from None
