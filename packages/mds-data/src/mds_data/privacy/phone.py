"""Telephone numbers: the written forms of many countries; phonenumbers checks their length."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

__all__ = ["is_phone"]

# How countries write numbers inside the country. Digits in whole, separators as they are used.
_NATIONAL = re.compile(
    r"(?:1[ .\-])?(?:\([2-9]\d\d\)[ .\-]{0,2}[2-9]\d\d[ .\-]\d{4}"  # North America
    r"|[2-9]\d\d(?P<us>[ .\-])[2-9]\d\d(?P=us)\d{4})"
    r"|1[3-9]\d{9}|1[3-9]\d(?P<cn>[ \-])\d{4}(?P=cn)\d{4}"  # China, mobile
    r"|0\d{2,3}-\d{7,8}|0\d{2}-\d{4}-\d{4}"  # China, Japan
    r"|[789]\d{4}[ \-]\d{5}"  # India
    r"|\(?[1-9]\d\)? ?9?\d{4}-\d{4}"  # Brazil
    r"|[67]\d\d(?P<es>[ .\-])(?:\d{3}(?P=es)\d{3}|\d\d(?P=es)\d\d(?P=es)\d\d)"  # Spain
    r"|9[1-9]\d \d{3} \d{3}"
    r"|3\d\d[ .\-]\d{6,7}|3\d\d \d{3} \d{4}"  # Italy, mobile
    r"|8[ \-]\(?[3489]\d\d\)?[ \-]\d{3}[ \-]\d\d[ \-]\d\d"  # Russia
    r"|(?:1300|1800|800|0800|0900)[ \-]\d{3}[ \-]\d{3}"  # toll free
)
# A trunk 0, two to six groups: Britain, Germany, France, Japan, Korea, Australia, Netherlands ...
_TRUNK = re.compile(
    r"\(?0[1-9]\d{0,4}\)?(?:[ .\-/\u00a0]{1,3}\d{2,8}){1,5}|0[1-9]\d{8,9}"
    r"|\(0[1-9]\d{0,4}\) ?\d{4,8}"
)
_INTERNATIONAL = re.compile(
    r"(?:\+|00|011[ \-])[ (]?[1-9]\d{0,3}\)?(?:[ .\-/()\u00a0\u202f\u2010-\u2013]{0,3}\d{1,12})+"
)
_DATE = re.compile(
    r"(?:\d{4}[\-/. ]\d{1,2}[\-/. ]\d{1,2}|\d{1,2}([\-/.])\d{1,2}\1(?:\d{4}|\d\d))(?:[ T,;].*)?\Z"
)
_ROW_BEFORE = re.compile(r"\d([ \-.])\d+\1\Z")
"""A longer row of groups that the number would be the end of."""
_ZIP_CODE = re.compile(r"\d{5}-\d{4}")
_WORDS = re.compile(
    r"(?:\btel|phone|\bcall|\bmobile|\bmob\b|\bcell|\bfax|\bdial|whats ?app|\bsms\b"
    r"|\btext (?:me|us)|\bcontact|\bring\b|\breach|hotline|\bt:|\bp:|\bm:"
    r"|☎|📞|电话|手机|联系|電話|携帯|전화|тел"
    r"|t[ée]l[ée]fono|celular|portable|handy\b|rufnummer|\bmóvil|\bm[oó]vil)[^\n]{0,24}\Z",
    re.IGNORECASE,
)
_NOT_PHONES = re.compile(
    r"(?:isbn(?:-1[03])?|issn|doi|order|invoice|serial|part|sku|tracking|ticket|case|account|acct|ref"
    r"|model|version|build|id|no\.|#|§|imei|port|pid|size|lines?|pp?\.|pages?)[ :=#.\-]{0,3}\Z",
    re.IGNORECASE,
)


def is_phone(written: str, *, before: str) -> bool:
    """Whether this is how a telephone number is written.

    Args:
        written: Digits with their separators, from a plus, parenthesis or digit to a digit.
        before: Some characters that stand before it; words such as "tel" vouch for bare digits.
    """
    digits = "".join(filter(str.isdigit, written))
    if not 7 <= len(digits) <= 15 or len(set(digits)) < 3 or _DATE.match(written.lstrip("(")):
        return False
    if written.startswith("0") and _ROW_BEFORE.search(before):
        return False
    if _INTERNATIONAL.fullmatch(written):
        return len(digits) >= 8 and _is_possible(written)
    if _NOT_PHONES.search(before):
        return False
    vouched = _WORDS.search(before) is not None
    if vouched and (written[0] != "0" or len(digits) >= 9) and "." not in written[-3:]:
        return True
    if _NATIONAL.fullmatch(written):
        return True
    if _ZIP_CODE.fullmatch(written):
        return False
    return 9 <= len(digits) <= 12 and _TRUNK.fullmatch(written) is not None and _is_even(written)


def _is_even(written: str) -> bool:
    """No decimals, no ratios: one kind of separator, apart from what stands around an area code."""
    inside = re.sub(r"^\(?\d+\)?[ .\-/\u00a0]{1,3}", "", written)
    return len(set(re.findall(r"[ .\-/\u00a0]", inside))) <= 1 and not written.startswith("0.")


def _is_possible(written: str) -> bool:
    library = _phonenumbers()
    if library is None:
        return True
    written = re.sub(r"\A(?:00|011[ \-])", "+", written)
    try:
        return bool(library.is_possible_number(library.parse(written, None)))
    except library.NumberParseException:
        return False


@cache
def _phonenumbers() -> Any:
    """The library of the extra [privacy], which knows how long numbers of each country are."""
    try:
        import phonenumbers
    except ImportError:
        return None
    return phonenumbers
