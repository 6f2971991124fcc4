"""Whether a national number that has letters is right: one function a number.

Each takes the number without separators, in upper case. Sources are the issuing registries.
"""

from __future__ import annotations

from mds_data.privacy.checksums import is_date, weighted

__all__ = [
    "curp",
    "dni",
    "fiscale",
    "hetu",
    "hkid",
    "nino",
    "nino_temporary",
    "nric",
    "pan",
    "pps",
    "rut",
    "taiwan",
]


def nino(d: str) -> bool:
    """United Kingdom, national insurance: prefixes that HMRC does not use."""
    return (
        d[0] not in "DFIQUV"
        and d[1] not in "DFIOQUV"
        and d[:2] not in ("BG", "GB", "KN", "NK", "NT", "TN", "ZZ")
    )


def nino_temporary(d: str) -> bool:
    """United Kingdom: TN, a date of birth and the sex; ZZ stands in forms and examples."""
    return d[:2] in ("TN", "ZZ")


def pan(d: str) -> bool:
    """India, income tax: the fourth letter tells the kind of holder."""
    return d[3] in "PCFHATBLJG"


def dni(d: str) -> bool:
    """Spain, citizens (DNI) and foreigners (NIE): 23 letters."""
    number = {"X": "0", "Y": "1", "Z": "2"}.get(d[0], d[0]) + d[1:-1]
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == d[-1]


_ODD_VALUES = """
1 0 5 7 9 13 15 17 19 21
1 0 5 7 9 13 15 17 19 21 2 4 18 20 11 3 6 8 12 14 16 10 22 25 24 23
"""
_ODD = dict(zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(int, _ODD_VALUES.split()), strict=True))


def fiscale(d: str) -> bool:
    """Italy: odd places count by a table of the Agenzia delle Entrate."""
    total = sum(_ODD[c] for c in d[:15:2])
    total += sum(int(c) if c.isdigit() else ord(c) - 65 for c in d[1:15:2])
    return chr(65 + total % 26) == d[15]


def curp(d: str) -> bool:
    """Mexico (RENAPO)."""
    order = "0123456789ABCDEFGHIJKLMNÑOPQRSTUVWXYZ"
    total = sum(order.index(c) * (18 - i) for i, c in enumerate(d[:17]))
    return -total % 10 == int(d[17]) if d[17].isdigit() else False


def nric(d: str) -> bool:
    """Singapore: T and G are numbers since 2000."""
    total = weighted(d[1:8], (2, 7, 6, 5, 4, 3, 2)) + (4 if d[0] in "TG" else 0)
    return ("JZIHGFEDCBA" if d[0] in "ST" else "XWUTRQPNMLK")[total % 11] == d[8]


def taiwan(d: str) -> bool:
    """Taiwan: the letter stands for two digits."""
    code = "ABCDEFGHJKLMNPQRSTUVXYWZIO".index(d[0]) + 10
    rest = weighted(d[1:9], range(8, 0, -1)) + int(d[9])
    return (code // 10 + code % 10 * 9 + rest) % 10 == 0


def hetu(d: str) -> bool:
    """The sign of the century, before the last four, is a letter or was left out with the dash."""
    right = "0123456789ABCDEFHJKLMNPRSTUVWXY"[int(d[:6] + d[-4:-1]) % 31]
    return right == d[-1] and is_date(d[4:6], d[2:4], d[:2])


def rut(d: str) -> bool:
    """Chile: K stands for 10."""
    total = sum(
        int(c) * w for c, w in zip(reversed(d[:-1]), (2, 3, 4, 5, 6, 7, 2, 3), strict=False)
    )
    return "0K987654321"[total % 11] == d[-1]


def pps(d: str) -> bool:
    """Ireland: the second letter, of numbers given out since 2013, counts nine times."""
    second = ord(d[8]) - 64 if len(d) == 9 else 0
    total = weighted(d[:7], range(8, 1, -1)) + 9 * (0 if second == 23 else second)
    return "WABCDEFGHIJKLMNOPQRSTUV"[total % 23] == d[7]


def hkid(d: str) -> bool:
    """Hong Kong: one or two letters, A is 10; a missing first one counts as 36."""
    values = [36] * (9 - len(d)) + [int(c, 36) for c in d[:-1]]
    rest = -sum(value * weight for value, weight in zip(values, range(9, 1, -1), strict=True)) % 11
    return "0123456789A"[rest] == d[-1]
