"""Find private data in a text. All detectors, cheap tests of the text before dear ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator

from mds_data.privacy.findings import KINDS, Finding, Kind, without_overlaps
from mds_data.privacy.folding import fold
from mds_data.privacy.network import find_email, find_ip
from mds_data.privacy.numbers import find_numbers
from mds_data.privacy.papers import find_papers
from mds_data.privacy.payment import find_crypto, find_iban
from mds_data.privacy.secrets import find_secrets

__all__ = ["AllowList", "find"]

_DETECTORS: tuple[tuple[frozenset[Kind], Callable[[str], Iterator[Finding]]], ...] = (
    (frozenset({"SECRET"}), find_secrets),
    (frozenset({"EMAIL"}), find_email),
    (frozenset({"IP"}), find_ip),
    (frozenset({"IBAN"}), find_iban),
    (frozenset({"CRYPTO"}), find_crypto),
    (frozenset({"CARD", "NATIONAL_ID", "PHONE"}), find_numbers),
    (frozenset({"PASSPORT", "NATIONAL_ID"}), find_papers),
)


class AllowList:
    """Values that may stay: whole values, or e-mail domains and the like by ``*.example.org``."""

    def __init__(self, patterns: Iterable[str] = ()) -> None:
        parts = [re.escape(pattern).replace(r"\*", ".*") for pattern in patterns if pattern]
        self._pattern = re.compile("|".join(parts), re.IGNORECASE) if parts else None

    def __contains__(self, value: str) -> bool:
        return self._pattern is not None and self._pattern.fullmatch(value) is not None


def find(
    text: str, *, kinds: Collection[Kind] = KINDS, allow: AllowList | None = None
) -> list[Finding]:
    """Private data in ``text``, in order of position and without overlaps.

    Args:
        text: Any text.
        kinds: What to look for.
        allow: Values that are no findings.

    Returns:
        (start, end, kind) of each finding; ``text[start:end]`` is the value.
    """
    wanted = frozenset(kinds)
    folded = fold(text)
    if folded is not None:
        found = [folded.original(each) for each in _found(folded.text, wanted)]
    else:
        found = _found(text, wanted)
    if allow is not None:
        found = [finding for finding in found if text[finding.start : finding.end] not in allow]
    return without_overlaps(found)


def _found(text: str, wanted: frozenset[Kind]) -> list[Finding]:
    return [
        finding
        for detects, detector in _DETECTORS
        if detects & wanted
        for finding in detector(text)
        if finding.kind in wanted
    ]
