"""Runs of digits in a text, and what they are: a card, an identity number, a telephone number.

Most text has few digits, so the search begins at them. A run may hold several numbers side by side
("call 555-123-4567 2024-01-02"): its groups are tried together, longest stretch first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mds_data.privacy.findings import Finding, Kind, lower
from mds_data.privacy.national import DIGIT_RULES, LETTER_RULES, Rule, names_a_number
from mds_data.privacy.payment import is_card
from mds_data.privacy.phone import is_phone

__all__ = ["find_numbers", "find_passports"]

_RUN = re.compile(r"\d(?:[ \-./()_\u00a0\u2009\u2010-\u2013\u202f]{0,3}\d)+")
_LEAD = re.compile(r"(?:(?:\+|\(\+?)[ (]?)\Z")
_GROUP = re.compile(r"\d+")
_MOST_GROUPS = 10
_PASSPORTS = (
    *("passport", "passeport", "reisepass", "pasaporte", "passaporto", "passaporte", "паспорт"),
    *("护照", "護照", "パスポート"),
)
_PASSPORT_NUMBER = re.compile(
    r"s?(?:[ \t]*(?:number|num|no|nr|n[o°º]|id|numéro|nummer|号码|号))?[ \t]*[.:#=\-]?[ \t]*"
    r"(?:is|lautet|est)?[ \t]*([A-Z]{0,3}[ \-]?\d[A-Z0-9]{5,9})(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def find_numbers(text: str) -> Iterator[Finding]:
    """Cards, national identity numbers and telephone numbers."""
    reached = 0
    for match in _RUN.finditer(text):
        start, end = match.span()
        if end <= reached:
            continue
        if _is_next_to_capitals(text, start, end):
            for finding in _with_letters(text, start, end):
                yield finding
                reached = finding.end
        if end > reached and end - start >= 7:
            for finding in _in_run(text, match):
                yield finding
                reached = finding.end


def find_passports(text: str) -> Iterator[Finding]:
    """Passport numbers; they share no checksum, so the word must stand before them."""
    lowered = lower(text)
    for word in _PASSPORTS:
        position = lowered.find(word)
        while position >= 0:
            match = _PASSPORT_NUMBER.match(text, position + len(word))
            if match:
                yield Finding(match.start(1), match.end(1), "PASSPORT")
            position = lowered.find(word, position + 1)


def _is_next_to_capitals(text: str, start: int, end: int) -> bool:
    """A capital stands at the digits, or one separator away as in ``AB 12 34 56 C``."""
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if before[-1:].isalpha() or after[:1].isalpha():
        return before[-1:].isupper() or after[:1].isupper()
    if end - start < 6:
        return False
    return (before[-1:] in (" ", "-") and before[:1].isupper()) or (
        after[:1] in (" ", "-") and after[1:].isupper()
    )


def _with_letters(text: str, start: int, end: int) -> Iterator[Finding]:
    """Identity numbers with letters whose digits begin in ``text[start:end]``."""
    left = max(0, start - 7)
    window = text[left : end + 16]
    for rule in LETTER_RULES:
        for match in rule.shape.finditer(window):
            begin, stop = left + match.start(), left + match.end()
            if begin >= end or _is_joined(text, begin, stop):
                continue
            if rule.check(_plain(match[0])):
                yield Finding(begin, stop, "NATIONAL_ID")
                return


def _plain(written: str) -> str:
    return "".join(filter(str.isalnum, written)).upper()


def _is_joined(text: str, start: int, end: int) -> bool:
    """Part of a longer word or number."""
    return text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()


def _in_run(text: str, run: re.Match[str]) -> Iterator[Finding]:
    """The numbers in a run of digits, longest stretch of whole groups first."""
    groups = [(m.start(), m.end()) for m in _GROUP.finditer(text, run.start(), run.end())]
    first = 0
    while first < len(groups):
        for last in range(min(len(groups), first + _MOST_GROUPS), first, -1):
            found = _number(text, groups[first][0], groups[last - 1][1])
            if found is not None:
                yield found
                first = last - 1
                break
        first += 1


def _number(text: str, start: int, end: int) -> Finding | None:
    count = sum(map(str.isdigit, text[start:end])) if end - start < 48 else 48
    if not 7 <= count <= 19 or _touches_word(text, start, end):
        return None
    if text[end : end + 1] in ("X", "x") and count == 17 and not text[end + 1 : end + 2].isalnum():
        end += 1
    before = text[max(0, start - 48) : start]
    written = text[start:end]
    kind = _kind(written, before=before)
    if kind is not None:
        return Finding(start, end, kind)
    lead = _LEAD.search(before)
    begin = start - len(lead[0]) if lead else start
    if is_phone(text[begin:end], before=before[: len(before) - (start - begin)]):
        return Finding(begin, end, "PHONE")
    return None


def _touches_word(text: str, start: int, end: int) -> bool:
    """Inside a word, a hexadecimal string, a decimal or a path: no number of its own."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if (before.isalnum() and before.isascii()) or (
        before in tuple("_./-@=&") and before and _is_glued(text, start)
    ):
        return True
    if after.isalnum() and after.isascii():
        return not (after in "Xx" and not text[end + 1 : end + 2].isalnum())
    return after == "_" or (after in ("-", ".", "/") and text[end + 1 : end + 2].isalnum())


def _is_glued(text: str, start: int) -> bool:
    """A separator before the number that something stands before in turn, as in ``a/123``."""
    before = text[start - 1]
    if before in "=&":
        return False
    return before in "_" or text[start - 2 : start - 1].isalnum()


def _kind(written: str, *, before: str) -> Kind | None:
    """CARD or NATIONAL_ID, told by checksums."""
    digits = "".join(filter(str.isdigit, written))
    named = names_a_number(before)
    for rule in DIGIT_RULES if named else ():
        if _obeys(rule, written, named=True):
            return "NATIONAL_ID"
    if is_card(digits) and _is_card_layout(written):
        return "CARD"
    for rule in DIGIT_RULES:
        if _obeys(rule, written, named=False):
            return "NATIONAL_ID"
    return None


def _obeys(rule: Rule, written: str, *, named: bool) -> bool:
    if rule.shape.fullmatch(written) or (named and rule.bare and rule.bare.fullmatch(written)):
        return rule.check(_plain(written))
    return False


def _is_card_layout(written: str) -> bool:
    """Groups of at least two digits; parentheses belong to telephones."""
    return "(" not in written and min(len(group) for group in _GROUP.findall(written)) >= 2
