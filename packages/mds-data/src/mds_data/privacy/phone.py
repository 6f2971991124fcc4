"""Telephone numbers: the written forms of many countries; phonenumbers checks their length."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

__all__ = ["end_of_extension", "goes_on", "is_day", "is_phone", "vouches"]

# How countries write numbers inside the country. Digits in whole, separators as they are used.
_NATIONAL = re.compile(
    r"(?:1[ .\-])?(?:\([2-9]\d\d\)[ .\-]{0,2}[2-9]\d\d[ .\-]\d{4}"  # North America
    r"|[2-9]\d\d(?P<us>[ .\-])[2-9]\d\d(?P=us)\d{4})"
    r"|1[3-9]\d{9}|1[3-9]\d(?P<cn>[ \-])\d{4}(?P=cn)\d{4}"  # China, mobile
    r"|0\d{2,3}-\d{7,8}|0\d{2}-\d{4}-\d{4}"  # China, Japan
    r"|[789]\d{4}[ \-]\d{5}|91-[6-9]\d{9}"  # India
    r"|\(?[1-9]\d\)? ?9?\d{4}-\d{4}|\([1-9]\d\) ?9\d{8}"  # Brazil
    r"|0\d{1,2}\)\d{3,4}-\d{4}"  # Korea
    r"|[67]\d\d(?:-\d{3}-\d{3}|(?P<es>[ .\-])\d\d(?P=es)\d\d(?P=es)\d\d)"  # Spain
    r"|3\d\d[ .\-]\d{6,7}|3\d\d \d{3} \d{4}"  # Italy, mobile
    r"|8[ \-]\(?[3489]\d\d\)?[ \-]\d{3}[ \-]\d\d[ \-]\d\d"  # Russia
    r"|\([3489]\d\d\) ?\d{3}-\d\d-\d\d"
    r"|(?:1300|1800|800|0800|0900)[ \-]\d{3}[ \-]\d{3}"  # toll free
)
# A trunk 0, two to six groups: Britain, Germany, France, Japan, Korea, Australia, Netherlands ...
_TRUNK = re.compile(
    r"\(?0[1-9]\d{0,4}\)?(?:[ .\-/\u00a0]{1,3}\d{2,8}){1,5}|07\d{9}|0[67]\d{8}"
    r"|\(0[1-9]\d{0,4}\) ?\d{4,8}"
)
_INTERNATIONAL = re.compile(
    r"(?:\(?\+[ (]?|00[ (]?|011[ \-])[1-9]\d{0,3}\)?"
    r"(?:[ .\-/()\u00a0\u202f\u2010-\u2013]{0,3}\d{1,12})+"
)
_DATE = re.compile(
    r"(?:(?:1[5-9]|20)\d\d[\-/. ](?:0?[1-9]|1[0-2])[\-/. ](?:0?[1-9]|[12]\d|3[01])(?!\d)"
    r"|\d{1,2}([\-/.])\d{1,2}\1(?:\d{4}|\d\d))(?:[ T,;].*)?\Z"
    r"|(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])\Z"
    r"|(?:1[5-9]|20)\d\d[ \-/\u2010-\u2013](?:1[5-9]|20)\d\d\Z"
)
_DECIMAL = re.compile(r"\d+\.\d+")
_ZIP_CODE = re.compile(r"\d{5}-\d{4}")
_WORDS = re.compile(
    r"(?:\bt[ée]l|phone|\bcall|\bmobile|\bmob\b|\bcell|\bfax|\bdial|whats ?app|\bsms\b"
    r"|\btext (?:me|us)|\bcontact|\bring\b|\breach|hotline|\bt:|\bp:|\bm:"
    r"|☎|📞|电话|手机|联系|拨打|致电|電話|携帯|問い合わせ|전화|연락처|휴대폰|문의|मोबाइल|फ़ोन"
    r"|тел|\bмоб|звони"  # noqa: RUF001
    r"|t[ée]l[ée]fono|celular|cellular|portable|handy\b|\bruf|\bm[oó]vil|\bllam[ae]|\bligue|\bligar"
    r"|\bappel|\bchiam|\bbel(?:len)?\b"
    r"|(?:my number|meine nummer|mijn nummer|mi n[úu]mero|mon num[ée]ro|mio numero"
    r"|meu n[úu]mero"  # codespell:ignore meu
    r"|мой номер))[^\n]{0,24}\Z",
    re.IGNORECASE,
)
_NOT_PHONES = re.compile(
    r"(?<![A-Za-z])(?:isbn(?:-1[03])?|issn|doi|order|invoice|serial|part|sku|tracking|ticket|case|account|acct|ref"
    r"|model|version|build|id|#|§|imei|port|pid|size|lines?|pp?\.|pages?"
    r"|[ps]/n|awb|dhl|ups|usps|fedex|parcel|bug|commit|merge)[ :=#.\-]{0,3}\Z",
    re.IGNORECASE,
)
_UNIT_AFTER = re.compile(
    r"[ \u00a0]?(?:[kKMGT]?(?:bps|Hz|[Bb]/?s?\b)|byte|[munp]?s\b|[kcm]?m\b|[km]?g\b|[%°€$£¥])"
)
_NUMBER_WORD = re.compile(r"(?<![A-Za-z])(?:no|nr|num|number|nummer)[ :=#.]{1,3}\Z", re.IGNORECASE)
_EXTENSION = re.compile(
    r",?[ \t]?(?:x|ext\.?|extn\.?|extension|durchwahl|poste|доб\.?)[ \t]?\d{1,6}(?![A-Za-z0-9])",
    re.IGNORECASE,
)


def is_phone(written: str, *, before: str, after: str = "") -> bool:
    """Whether this is how a telephone number is written.

    Args:
        written: Digits with their separators, from a plus, parenthesis or digit to a digit.
        before: Some characters that stand before it; words such as "tel" vouch for bare digits.
        after: The next characters; a row of groups or decimals that go on are no telephone.
    """
    digits = "".join(filter(str.isdigit, written))
    if not 7 <= len(digits) <= 15 or len(set(digits)) < 3 or is_day(written.lstrip("(")):
        return False
    named = _NUMBER_WORD.sub("", before)
    vouched = vouches(before)
    if ".." in written or (_DECIMAL.fullmatch(written) and not vouched):
        return False
    other = _NOT_PHONES.search(named) or (len(named) < len(before) and not vouched)
    abroad = _INTERNATIONAL.fullmatch(written) and ("+" in written[:2] or not other)
    if abroad and (not vouched or _is_possible(written)):
        return len(digits) >= 8 and _is_possible(written)
    if other:
        return False
    if vouched and (written[0] != "0" or len(digits) >= 8) and "." not in written[-3:]:
        return True
    if goes_on(written, after) or _UNIT_AFTER.match(after):
        return False
    if _NATIONAL.fullmatch(written):
        return True
    if _ZIP_CODE.fullmatch(written):
        return False
    return 9 <= len(digits) <= 12 and _TRUNK.fullmatch(written) is not None and _is_even(written)


def is_day(written: str) -> bool:
    """A day, perhaps with a time behind it, or two years."""
    return _DATE.match(written) is not None


def vouches(before: str) -> bool:
    """Whether the words before a number say that it is one to call."""
    return _WORDS.search(_NUMBER_WORD.sub("", before)) is not None


def goes_on(written: str, after: str) -> bool:
    """A further group, as in the rows of a table, or decimals, as of a sum of money."""
    last = written.rstrip("0123456789")[-1:]
    return after[1:2].isdigit() and (after[:1] == last or (after[:1] == "," and after[2:3] != " "))


def end_of_extension(text: str, end: int) -> int:
    """Behind the extension that follows a telephone number, as ``ext. 12``, or ``end``."""
    match = _EXTENSION.match(text, end)
    return match.end() if match else end


def _is_even(written: str) -> bool:
    """No decimals, no ratios: one kind of separator, apart from what stands around an area code."""
    inside = re.sub(r"^\(?\d+\)?[ .\-/\u00a0]{1,3}", "", written)
    return len(set(re.findall(r"[ .\-/\u00a0]", inside))) <= 1 and not written.startswith("0.")


def _is_possible(written: str) -> bool:
    library = _phonenumbers()
    if library is None:
        return True
    written = re.sub(r"\A(?:00|011[ \-])", "+", written)
    written = re.sub(r"\A\+52[ \-.]?1", "+52", written)  # Mexico, mobile, until 2019
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
