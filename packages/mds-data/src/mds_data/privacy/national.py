"""National identity, tax and social-security numbers: one rule a number, checked by its checksum.

A rule knows how the number is written, what its check digits are, and whether the digits alone are
enough: where a checksum is weak or missing, a word before the number must name it. Sources are the
issuing registries; ISO 7064, Luhn and Verhoeff where they use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mds_data.privacy.checksums import is_date, luhn, mod11_2, mod11_10, verhoeff, weighted

__all__ = ["DIGIT_RULES", "LETTER_RULES", "Rule", "names_a_number"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of number is told."""

    country: str
    shape: re.Pattern[str]
    """The whole number as it is written, separators included."""
    check: Callable[[str], bool]
    """Whether its letters and digits, without separators and in upper case, are right."""
    bare: re.Pattern[str] | None = None
    """Another shape, taken only where a word before it names such a number."""


_WORDS = re.compile(
    r"(?:\bssn|social[ \-]?sec|national[ \-]?(?:id|ins)|\bnino\b|\bn\.?i\.?\b"
    r"|tax[ \-]?(?:id|file|payer|no|num)"
    r"|\btin\b|\bitin\b|\bnhs\b|\bsin\b|\btfn\b|\bbsn\b|\bcpf\b|\bcnpj\b|\bpan\b|aadhaa?r|\buid(?:ai)?\b"
    r"|\bnir\b|s[ée]cu(?:rit[ée])?\b|\bdni\b|\bnie\b|\bnif\b|\brut\b|\bcurp\b|\brfc\b|\bpesel\b|\bnip\b"
    r"|\bsteuer|\bidnr\b|ausweis|personn?(?:ummer|alnr|enr)|\bcpr\b|\bhetu\b|\bahv\b|\bavs\b|\bt\.?c\.?\b"
    r"|codice fiscale|identi(?:ty|fica|f[iy]|t[ée])|\bid\b|id[ \-]?(?:card|number|no)"
    r"|resident|citizen"
    r"|身份证|身分證|证件|公民|号码|個人番号|マイナンバー|주민|инн|снилс|passport|ss#|soc\.? ?sec)"
    r"[^\n]{0,32}\Z",
    re.IGNORECASE,
)


def names_a_number(before: str) -> bool:
    """Whether the words before a number (about 48 characters) say that it is an identity number."""
    return _WORDS.search(before) is not None


def _us_ssn(d: str) -> bool:
    return d[:3] not in ("000", "666") and d[0] != "9" and d[3:5] != "00" and d[5:] != "0000"


def _us_itin(d: str) -> bool:
    return d[0] == "9" and 50 <= int(d[3:5]) <= 99


def _us(d: str) -> bool:
    return _us_ssn(d) or _us_itin(d)


def _china(d: str) -> bool:
    return "11" <= d[:2] <= "91" and is_date(d[6:10], d[10:12], d[12:14]) and mod11_2(d)


def _cpf(d: str) -> bool:
    if len(set(d)) == 1:
        return False
    first = weighted(d[:9], range(10, 1, -1)) * 10 % 11 % 10
    second = weighted(d[:10], range(11, 1, -1)) * 10 % 11 % 10
    return d[9:] == f"{first}{second}"


def _cnpj(d: str) -> bool:
    weights = (6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)
    first = -weighted(d[:12], weights[1:]) % 11
    second = -weighted(d[:13], weights) % 11
    return d[12:] == f"{first % 10}{second % 10}" and len(set(d)) > 1


def _nir(d: str) -> bool:
    """France; Corsica's 2A and 2B count as 19 and 18 (INSEE)."""
    digits = d.replace("2A", "19").replace("2B", "18")
    if not digits.isdigit() or digits[0] not in "123478":
        return False
    month = int(digits[3:5])
    plausible = 1 <= month <= 12 or 20 <= month <= 42 or month >= 50
    return plausible and 97 - int(digits[:13]) % 97 == int(digits[13:])


def _steuer(d: str) -> bool:
    """Germany: one or two digits occur more than once among the first ten."""
    return d[0] != "0" and len(set(d[:10])) in (8, 9) and mod11_10(d)


def _aadhaar(d: str) -> bool:
    return d[0] not in "01" and verhoeff(d) and len(set(d)) > 2


def _nhs(d: str) -> bool:
    check = 11 - weighted(d[:9], range(10, 1, -1)) % 11
    return check % 11 == int(d[9]) and check != 10


def _sin(d: str) -> bool:
    return d[0] not in "08" and luhn(d)


def _tfn(d: str) -> bool:
    return weighted(d, (1, 4, 3, 7, 5, 8, 6, 9, 10)) % 11 == 0


def _bsn(d: str) -> bool:
    return weighted(d, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 and d[:3] != "000"


def _pesel(d: str) -> bool:
    month = int(d[2:4]) % 20
    check = -weighted(d[:10], (1, 3, 7, 9, 1, 3, 7, 9, 1, 3)) % 10
    return is_date(d[:2], str(month), d[4:6]) and check == int(d[10])


def _turkey(d: str) -> bool:
    numbers = [int(digit) for digit in d]
    tenth = (7 * sum(numbers[0:9:2]) - sum(numbers[1:8:2])) % 10
    return d[0] != "0" and tenth == numbers[9] and sum(numbers[:10]) % 10 == numbers[10]


def _south_africa(d: str) -> bool:
    return is_date(d[:2], d[2:4], d[4:6]) and d[10] in "012" and luhn(d)


def _sweden(d: str) -> bool:
    ten = d[-10:]
    day = int(ten[4:6]) % 60  # coordination numbers add 60
    return is_date(ten[:2], ten[2:4], str(day)) and luhn(ten)


def _korea(d: str) -> bool:
    check = (11 - weighted(d[:12], (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11) % 10
    return is_date(d[:2], d[2:4], d[4:6]) and d[6] in "12345678" and check == int(d[12])


def _ahv(d: str) -> bool:
    return d[:3] == "756" and sum(int(c) * (3 if i % 2 else 1) for i, c in enumerate(d)) % 10 == 0


def _belgium(d: str) -> bool:
    base = int(d[:9])
    return int(d[9:]) in (97 - base % 97, 97 - (2_000_000_000 + base) % 97) and int(d[2:4]) <= 52


def _japan(d: str) -> bool:
    weights = (6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)
    rest = weighted(d[:11], weights) % 11
    return (0 if rest <= 1 else 11 - rest) == int(d[11])


def _norway(d: str) -> bool:
    first = -weighted(d[:9], (3, 7, 6, 1, 8, 9, 4, 5, 2)) % 11
    second = -weighted(d[:10], (5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return is_date(d[4:6], d[2:4], str(int(d[:2]) % 40)) and d[9:] == f"{first}{second}"


def _denmark(d: str) -> bool:
    return is_date(d[4:6], d[2:4], d[:2])


def _snils(d: str) -> bool:
    return weighted(d[:9], range(9, 0, -1)) % 101 % 100 == int(d[9:])


def _nino(d: str) -> bool:
    return (
        d[0] not in "DFIQUV"
        and d[1] not in "DFIOQUV"
        and d[:2] not in ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")
    )


def _pan(d: str) -> bool:
    return d[3] in "PCFHATBLJG"


def _dni(d: str) -> bool:
    number = {"X": "0", "Y": "1", "Z": "2"}.get(d[0], d[0]) + d[1:-1]
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == d[-1]


_ODD_VALUES = """
1 0 5 7 9 13 15 17 19 21
1 0 5 7 9 13 15 17 19 21 2 4 18 20 11 3 6 8 12 14 16 10 22 25 24 23
"""
_ODD = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(int, _ODD_VALUES.split()), strict=True))


def _fiscale(d: str) -> bool:
    total = sum(_ODD[c] for c in d[:15:2])
    total += sum(int(c) if c.isdigit() else ord(c) - 65 for c in d[1:15:2])
    return chr(65 + total % 26) == d[15]


def _curp(d: str) -> bool:
    order = "0123456789ABCDEFGHIJKLMNÑOPQRSTUVWXYZ"
    total = sum(order.index(c) * (18 - i) for i, c in enumerate(d[:17]))
    return -total % 10 == int(d[17]) if d[17].isdigit() else False


def _nric(d: str) -> bool:
    total = weighted(d[1:8], (2, 7, 6, 5, 4, 3, 2)) + (4 if d[0] in "TG" else 0)
    return ("JZIHGFEDCBA" if d[0] in "ST" else "XWUTRQPNMLK")[total % 11] == d[8]


def _taiwan(d: str) -> bool:
    code = "ABCDEFGHJKLMNPQRSTUVXYWZIO".index(d[0]) + 10
    rest = weighted(d[1:9], range(8, 0, -1)) + int(d[9])
    return (code // 10 + code % 10 * 9 + rest) % 10 == 0


def _hetu(d: str) -> bool:
    """The sign of the century, before the last four, is a letter or was left out with the dash."""
    return "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(d[:6] + d[-4:-1]) % 31] == d[-1]


def _rut(d: str) -> bool:
    total = sum(
        int(c) * w for c, w in zip(reversed(d[:-1]), (2, 3, 4, 5, 6, 7, 2, 3), strict=False)
    )
    return "0K987654321"[total % 11] == d[-1]


def _any(_: str) -> bool:
    return True


def _rule(country: str, shape: str, check: Callable[[str], bool], bare: str | None = None) -> Rule:
    return Rule(country, re.compile(shape), check, None if bare is None else re.compile(bare))


_S = r"[ .\-\u2010-\u2013/\u00a0\u202f]"  # between groups

DIGIT_RULES: tuple[Rule, ...] = (
    _rule("CN", rf"\d{{6}}{_S}?\d{{8}}{_S}?\d{{3}}[\dXx]", _china),
    _rule("US", r"\d{3}([\-\u2010-\u2013 ])\d{2}\1\d{4}", _us, r"\d{9}|\d{3}\.\d\d\.\d{4}"),
    _rule("BR", r"\d{3}\.?\d{3}\.?\d{3}[\-/]?\d{2}|\d{3} \d{3} \d{3} \d{2}", _cpf),
    _rule("BR", r"\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}", _cnpj, r"\d{14}"),
    _rule(
        "FR",
        rf"[1-8]{_S}?\d\d{_S}?\d\d{_S}?(?:\d\d|2[AB]){_S}?\d{{3}}{_S}?\d{{3}}{_S}{{0,3}}\d\d",
        _nir,
    ),
    _rule("DE", r"\d{2} ?\d{3} ?\d{3} ?\d{3}|\d{2}/\d{3}/\d{3}/\d{3}", _steuer),
    _rule("IN", r"\d{4}[ \-]?\d{4}[ \-]?\d{4}", _aadhaar),
    _rule("KR", r"\d{6}-\d{7}", _korea),
    _rule("CH", r"756\.?\d{4}\.?\d{4}\.?\d{2}", _ahv),
    _rule("ZA", r"\d{6} ?\d{4} ?\d{3}", _south_africa),
    _rule("SE", r"(?:19|20)?\d{6}[\-+]\d{4}", _sweden, r"(?:19|20)?\d{10}"),
    _rule("PL", r"\d{11}", _pesel),
    _rule("NO", r"\d{6} ?\d{5}", _norway),
    _rule("BE", r"\d\d\.\d\d\.\d\d-\d{3}\.\d\d", _belgium, r"\d{11}"),
    _rule("RU", r"\d{3}-\d{3}-\d{3} \d\d", _snils, r"\d{11}"),
    _rule("TR", r"(?!)", _turkey, r"\d{11}"),
    _rule("GB", r"(?!)", _nhs, r"\d{3}[ \-]?\d{3}[ \-]?\d{4}"),
    _rule("CA", r"\d{3}([ \-])\d{3}\1\d{3}", _sin, r"\d{9}"),
    _rule("AU", r"(?!)", _tfn, r"\d{3} ?\d{3} ?\d{3}"),
    _rule("NL", r"(?!)", _bsn, r"\d{9}|\d{4}[. ]\d\d[. ]\d{3}|\d{3}[. ]\d{3}[. ]\d{3}"),
    _rule("DK", r"(?!)", _denmark, r"\d{6}-?\d{4}"),
    _rule("JP", r"(?!)", _japan, r"\d{4}[ \-]?\d{4}[ \-]?\d{4}"),
    _rule("CL", r"\d{1,2}\.\d{3}\.\d{3}-\d", _rut, r"\d{7,8}-\d"),
)
"""Numbers that consist of digits (China's may end in X)."""

LETTER_RULES: tuple[Rule, ...] = (
    _rule("GB", r"[A-Z]{2} ?\d\d ?\d\d ?\d\d ?[A-D]|[A-Z]{2}(-\d\d){3}-[A-D]", _nino),
    _rule("IN", r"[A-Z]{5}\d{4}[A-Z]", _pan),
    _rule("ES", r"\d{8}-?[A-Z]|[XYZ]-?\d{7}-?[A-Z]", _dni),
    _rule("IT", r"[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]", _fiscale),
    _rule("MX", r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z\d]\d", _curp),
    _rule("SG", r"[STFG]\d{7}[A-Z]", _nric),
    _rule("TW", r"[A-Z][12]\d{8}", _taiwan),
    _rule("FI", r"\d{6}[\-+A]\d{3}[0-9A-Y]", _hetu),
    _rule("CL", r"\d{1,2}\.?\d{3}\.?\d{3}-K", _rut),
    _rule("FR", rf"[12]{_S}?\d\d{_S}?\d\d{_S}?2[AB]{_S}?\d{{3}}{_S}?\d{{3}}{_S}{{0,3}}\d\d", _nir),
)
"""Numbers in which letters stand among the digits."""
