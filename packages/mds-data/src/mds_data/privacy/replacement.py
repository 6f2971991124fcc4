"""Put something harmless where private data stands: a mask, a type, a pseudonym, or nothing."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias, get_args

from mds_data.errors import DataError
from mds_data.privacy.detection import AllowList, find
from mds_data.privacy.findings import KINDS, Finding, Kind, without_overlaps
from mds_data.privacy.folding import fold

__all__ = ["MODES", "ROUNDS", "Mode", "Redactor", "redact"]

Mode: TypeAlias = Literal["placeholder", "mask", "pseudonym", "drop"]
MODES: tuple[Mode, ...] = get_args(Mode)
ROUNDS = 4
"""Passes over one text, at most."""
_SHORTEST_KEY = 16


class Redactor:
    """Replaces private data and counts what it replaced; keeps no value.

    Args:
        mode: ``placeholder`` writes ``<EMAIL>``; ``mask`` as many asterisks as characters;
            ``pseudonym`` the type and 16 digits of an HMAC-SHA-256 of the value, the same for the
            same value and key wherever it occurs; ``drop`` nothing.
        kinds: What to replace.
        key: Secret of ``pseudonym``, at least 16 bytes. Whoever has it can test a guess.
        allow: Values that stay.
        names: Finds names of persons, such as a `NameFinder`.

    Raises:
        DataError: If a pseudonym is wanted without a good key.
    """

    def __init__(
        self,
        mode: Mode = "placeholder",
        *,
        kinds: Collection[Kind] = KINDS,
        key: bytes | None = None,
        allow: AllowList | None = None,
        names: Callable[[str], Collection[Finding]] | None = None,
    ) -> None:
        if mode == "pseudonym" and (key is None or len(key) < _SHORTEST_KEY):
            raise DataError(
                f"pseudonyms need a secret key of at least {_SHORTEST_KEY} bytes, or anyone could "
                f"undo them by trying values; make one with: openssl rand -hex 32"
            )
        self.mode = mode
        self.kinds = tuple(kinds)
        self.counts: Counter[Kind] = Counter()
        self._key = key or b""
        self._allow = allow
        self._names = names

    def __call__(self, text: str) -> str:
        """``text`` with everything replaced. What comes out holds nothing more to replace."""
        for _ in range(ROUNDS):  # what closes around a replaced value may be a finding in turn
            found = self.find(text)
            if not found:
                break
            text = self.replace(text, found)
        return text

    def find(self, text: str) -> list[Finding]:
        """What would be replaced."""
        found = find(text, kinds=self.kinds, allow=self._allow)
        if self._names is None:
            return found
        names = [
            name
            for name in self._names(text)
            if self._allow is None or text[name.start : name.end] not in self._allow
        ]
        return without_overlaps([*found, *names])

    def replace(self, text: str, findings: Collection[Finding]) -> str:
        """``text`` with these findings replaced, counted."""
        parts: list[str] = []
        done = 0
        for start, end, kind in findings:
            parts += (text[done:start], self._instead(text[start:end], kind))
            done = end
            self.counts[kind] += 1
        return "".join((*parts, text[done:]))

    def _instead(self, value: str, kind: Kind) -> str:
        if self.mode == "mask":
            return "".join(character if character == "\n" else "*" for character in value)
        if self.mode == "pseudonym":
            return f"<{kind}_{_letters(self._key, kind=kind, value=value)}>"
        return "" if self.mode == "drop" else f"<{kind}>"


def _letters(key: bytes, *, kind: Kind, value: str) -> str:
    """80 bits of the value's HMAC in letters that no detector takes for a number."""
    folded = fold(value)
    value = value if folded is None else folded.text
    plain = "".join(value.split()).casefold() if kind == "EMAIL" else _without_layout(value)
    digest = hmac.new(key, f"{kind}\0{plain}".encode(), hashlib.sha256).digest()
    number = int.from_bytes(digest[:10], "big")
    return "".join("abcdefghijklmnop"[number >> 4 * place & 15] for place in range(20))


def _without_layout(value: str) -> str:
    """The same number written in groups or not has one pseudonym."""
    plain = "".join(filter(str.isalnum, value))
    return plain if any(map(str.isdigit, plain)) else value


def redact(
    text: str,
    mode: Mode = "placeholder",
    *,
    kinds: Collection[Kind] = KINDS,
    key: bytes | None = None,
    allow: AllowList | None = None,
) -> str:
    """``text`` without the private data that `find` finds in it; see `Redactor`."""
    return Redactor(mode, kinds=kinds, key=key, allow=allow)(text)
