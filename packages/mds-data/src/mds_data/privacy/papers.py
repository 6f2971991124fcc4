"""Numbers of passports and identity cards, which only the word before them tells from others."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mds_data.privacy.checksums import weighted_letters
from mds_data.privacy.findings import Finding, Kind, lower, present

__all__ = ["find_papers"]

_PASSPORTS = (
    *("passport", "passeport", "reisepass", "pasaporte", "passaporto", "passaporte", "паспорт"),
    *("护照", "護照", "パスポート"),
)
_CARDS = ("personalausweis", "ausweisnummer", "ausweis-nr", "ausweisnr", "ausweis nr")
_LINK = (
    r"s?(?:[ \t\-]*(?:number|num|no|nr|n[o°º]|id|numéro|nummer|号码|号))?"
    r"[ \t]*[.:#=\-\uff1a]?[ \t]*"
    r"(?:is|ist|lautet|est)?[ \t]*"  # codespell:ignore ist
)
_PASSPORT_NUMBER = re.compile(
    _LINK + r"([A-Z]{0,3}[ \-]?\d[A-Z0-9]{5,9})(?![A-Za-z0-9])", re.IGNORECASE
)
_CARD_NUMBER = re.compile(
    _LINK + r"([CFGHJ-NPRTV-Z0-9]{9}\d?)(?:<<\w*|D\b)?(?![A-Za-z0-9])", re.IGNORECASE
)


def find_papers(text: str) -> Iterator[Finding]:
    """Passports, and German identity cards; the word must stand before the number."""
    lowered = lower(text)
    yield from _after(text, lowered, _PASSPORTS, "pas", _PASSPORT_NUMBER, kind="PASSPORT")
    if "ausweis" in lowered:
        found = _after(text, lowered, _CARDS, "ausweis", _CARD_NUMBER, kind="NATIONAL_ID")
        yield from (each for each in found if _is_card(text[each.start : each.end].upper()))


def _after(
    text: str,
    lowered: str,
    words: tuple[str, ...],
    within: str,
    number: re.Pattern[str],
    *,
    kind: Kind,
) -> Iterator[Finding]:
    for word in present(lowered, words, within=within):
        position = lowered.find(word)
        while position >= 0:
            match = number.match(text, position + len(word))
            if match:
                yield Finding(match.start(1), match.end(1), kind)
            position = lowered.find(word, position + 1)


def _is_card(number: str) -> bool:
    """Germany, since 2010: nine letters and digits, and a check digit that may be left out."""
    if not any(map(str.isdigit, number)):
        return False
    return len(number) == 9 or weighted_letters(number[:9]) % 10 == int(number[9])
