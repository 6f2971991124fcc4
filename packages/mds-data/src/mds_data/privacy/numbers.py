"""Runs of digits in a text, and what they are: a card, an identity number, a telephone number.

Most text has few digits, so the search begins at them. A run may hold several numbers side by side
("call 555-123-4567 2024-01-02"): its groups are tried together, longest stretch first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mds_data.privacy.findings import Finding, Kind, is_word
from mds_data.privacy.national import DIGIT_RULES, LETTER_RULES, Rule
from mds_data.privacy.national_words import names_a_number, names_this_number
from mds_data.privacy.payment import broken_card, is_card, names_another_number
from mds_data.privacy.phone import end_of_extension, goes_on, is_day, is_phone, vouches

__all__ = ["find_numbers"]

_RUN = re.compile(r"\d(?:[ \-./()_\u00a0\u2009\u2010-\u2013\u202f]{0,3}\d)+")
_LEAD = re.compile(r"(?:(?:\+|\(\+?)[ (]?)\Z")
_GROUP = re.compile(r"\d+")
_MOST_GROUPS = 10
_LONGEST = 48  # characters
_FEWEST_DIGITS, _MOST_DIGITS = 7, 19
_SEPARATED = re.compile(r"\d+([^\d])\d")
_BREAKS = ("\n", "\r", "\t", "\u00b7")
_CARD_WORD = re.compile(r"(?<![A-Za-z])(?:visa|master ?card|amex|card|cc|pan)\Z", re.IGNORECASE)


def find_numbers(text: str) -> Iterator[Finding]:
    """Cards, national identity numbers and telephone numbers."""
    reached = 0
    for match in _RUN.finditer(text):
        start, end = match.span()
        if end <= reached:
            continue
        if text[end : end + 1] in _BREAKS and (broken := broken_card(text, start)):
            yield broken
            reached = broken.end
            continue
        if _may_have_letters(text, start, end):
            for finding in _with_letters(text, start, end):
                yield finding
                reached = finding.end
        if end > reached and end - start >= 7:
            for finding in _in_run(text, match):
                yield finding
                reached = finding.end


def _may_have_letters(text: str, start: int, end: int) -> bool:
    """Letters may belong to these digits: at them, or one separator away as in ``AB 12 34 56 C``.

    The first digits of such numbers are two (Italy), four (India's PAN) or six and more.
    """
    if end - start < 6:
        letters = {2: 6, 4: 5}.get(end - start, 0)
        before = text[max(0, start - letters) : start] if letters else ""
        return before.isalpha() and len(before) == letters and text[end : end + 1].isalpha()
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if before[-1:].isalpha() or after[:1].isalpha():
        return before[-1:].isupper() or after[:1].isupper()
    return (before[-1:] in (" ", "-") and before[:1].isupper()) or (
        after[:1] in (" ", "-") and after[1:].isupper()
    )


def _with_letters(text: str, start: int, end: int) -> Iterator[Finding]:
    """Identity numbers with letters whose digits begin in ``text[start:end]``."""
    left = max(0, start - 7)
    window = text[left : end + 16]
    if not window.isascii():
        window = "".join(c if c.isascii() else " " for c in window)
    named = names_a_number(text[max(0, start - 48) : start])
    for rule in LETTER_RULES:
        shape = rule.bare if named and rule.bare else rule.shape
        for match in shape.finditer(window.upper() if named else window):
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
    return is_word(text[start - 1 : start]) or is_word(text[end : end + 1])


def _in_run(text: str, run: re.Match[str]) -> Iterator[Finding]:
    """The numbers in a run of digits, longest stretch of whole groups first."""
    groups = [(m.start(), m.end()) for m in _GROUP.finditer(text, run.start(), run.end())]
    first = 0
    while first < len(groups):
        for last in _ends(text, groups, first):
            found = _number(text, groups[first][0], groups[last][1])
            if found is not None:
                yield found
                first = last
                break
        first += 1


def _ends(text: str, groups: list[tuple[int, int]], first: int) -> list[int]:
    """Groups that a number from ``first`` on may end with, farthest first.

    It has 7 to 19 digits, and about two or more in a group: lists of small numbers are none.
    """
    start, end = groups[first]
    in_row = _is_in_row(text[max(0, start - 2) : start], text[start : end + 2])
    ends, count = [], 0
    for place in range(first, min(len(groups), first + (1 if in_row else _MOST_GROUPS))):
        count += groups[place][1] - groups[place][0]
        if count > _MOST_DIGITS:
            break
        if count >= _FEWEST_DIGITS and count >= 2 * (place - first):
            ends.append(place)
    return ends[::-1]


def _number(text: str, start: int, end: int) -> Finding | None:
    if end - start > _LONGEST or _touches_word(text, start, end) or is_day(text[start:end]):
        return None
    count = sum(map(str.isdigit, text[start:end]))
    if text[end : end + 1] in ("X", "x") and count == 17 and not text[end + 1 : end + 2].isalnum():
        end += 1
    before = text[max(0, start - 48) : start]
    written = text[start:end]
    begin = _with_lead(text, start, end)
    if "+" not in text[begin:start]:
        kind = _kind(written, before=before, after=text[end : end + 4])
        if kind is not None:
            return Finding(start, end, kind)
    before = text[max(0, begin - 48) : begin]
    if is_phone(text[begin:end], before=before, after=text[end : end + 4]):
        return Finding(begin, end_of_extension(text, end), "PHONE")
    return None


def _with_lead(text: str, start: int, end: int) -> int:
    """Where a number begins with its plus and parenthesis, unless that closes behind it."""
    lead = _LEAD.search(text, max(0, start - 3), start)
    if lead is None:
        return start
    begin = lead.start() + text.startswith("((", lead.start())
    if text[begin] == "(" and text.count(")", start, end) <= text.count("(", start, end):
        begin += 1 if text[begin + 1] == "+" else start - begin
    if text[begin] == "+" and is_word(text[max(0, begin - 1) : begin]):
        return start  # U+2032, 1.0+20221128
    return begin


def _is_in_row(before: str, written: str) -> bool:
    """The end of a longer row of groups: ``9274 4111 1111 1111 1111``, a matrix, a dump."""
    separator = _SEPARATED.match(written)
    return separator is not None and before[-1:] == separator[1] and before[-2:-1].isdigit()


def _touches_word(text: str, start: int, end: int) -> bool:
    """Inside a word, a hexadecimal string, a decimal or a path: no number of its own."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if before == ":" and text[start - 2 : start - 1].isdigit():  # a time
        return True
    if before.isalpha() and _CARD_WORD.search(text, max(0, start - 12), start):
        before = ""  # VISA4111111111111111
    if (before.isalnum() and before.isascii()) or (
        before in tuple("_./-@=&") and before and _is_glued(text, start)
    ):
        return True
    if after.isalnum() and after.isascii():
        is_check_digit = after in "Xx" and not text[end + 1 : end + 2].isalnum()
        return not is_check_digit and end_of_extension(text, end) == end
    return after == "_" or (after in ("-", ".", "/") and text[end + 1 : end + 2].isalnum())


def _is_glued(text: str, start: int) -> bool:
    """A separator before the number that something stands before in turn, as in ``a/123``."""
    before = text[start - 1]
    if before in "=&":
        return False
    return before in "_" or text[start - 2 : start - 1].isalnum()


def _kind(written: str, *, before: str, after: str) -> Kind | None:
    """CARD or NATIONAL_ID, told by checksums."""
    digits = "".join(filter(str.isdigit, written))
    named = names_a_number(before)
    for rule in DIGIT_RULES if named else ():
        if _obeys(rule, written, named=True):
            return "NATIONAL_ID"
    if names_this_number(before, digits):
        return "NATIONAL_ID"
    if is_card(digits) and _is_card_layout(written) and not names_another_number(before):
        return "CARD"
    if not named and (vouches(before) or goes_on(written, after)):
        return None
    for rule in DIGIT_RULES:
        if _obeys(rule, written, named=False):
            return "NATIONAL_ID"
    return None


def _obeys(rule: Rule, written: str, *, named: bool) -> bool:
    if rule.shape.fullmatch(written) or (named and rule.bare and rule.bare.fullmatch(written)):
        return rule.check(_plain(written))
    return False


def _is_card_layout(written: str) -> bool:
    """In one piece, in fours, in halves, or as American Express and Diners Club print it."""
    lengths = [len(group) for group in _GROUP.findall(written)]
    if len(lengths) == 1 or lengths in ([4, 6, 5], [4, 6, 4], [8, 8], [6, 10]):
        return True
    return set(lengths[:-1]) == {4} and lengths[-1] <= 4 and "(" not in written
