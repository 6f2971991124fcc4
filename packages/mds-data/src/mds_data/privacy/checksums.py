"""Check digits, as the standards and registries define them. Each takes plain digits or letters."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

__all__ = [
    "is_date",
    "luhn",
    "mod11_2",
    "mod11_10",
    "mod97",
    "verhoeff",
    "weighted",
    "weighted_letters",
]

_DOUBLED = (0, 2, 4, 6, 8, 1, 3, 5, 7, 9)

# The dihedral group of order 10 and the permutation of Verhoeff's scheme (Verhoeff 1969).
_PRODUCT = (
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (1, 2, 3, 4, 0, 6, 7, 8, 9, 5),
    (2, 3, 4, 0, 1, 7, 8, 9, 5, 6),
    (3, 4, 0, 1, 2, 8, 9, 5, 6, 7),
    (4, 0, 1, 2, 3, 9, 5, 6, 7, 8),
    (5, 9, 8, 7, 6, 0, 4, 3, 2, 1),
    (6, 5, 9, 8, 7, 1, 0, 4, 3, 2),
    (7, 6, 5, 9, 8, 2, 1, 0, 4, 3),
    (8, 7, 6, 5, 9, 3, 2, 1, 0, 4),
    (9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
)
_PERMUTED = (1, 5, 7, 6, 2, 8, 3, 0, 9, 4)


def luhn(digits: str) -> bool:
    """ISO/IEC 7812-1: payment cards, and many identity numbers."""
    numbers = [int(digit) for digit in reversed(digits)]
    return (sum(numbers[::2]) + sum(_DOUBLED[number] for number in numbers[1::2])) % 10 == 0


def mod97(characters: str) -> bool:
    """ISO 7064 MOD 97-10 after moving the first four characters to the end: IBAN (ISO 13616)."""
    moved = characters[4:] + characters[:4]
    return int("".join(str(int(character, 36)) for character in moved)) % 97 == 1


def mod11_2(characters: str) -> bool:
    """ISO 7064 MOD 11-2, X for ten: Chinese resident identity numbers (GB 11643)."""
    total = 0
    for character in characters:
        total = (2 * total + (10 if character in "Xx" else int(character))) % 11
    return total == 1


def mod11_10(digits: str) -> bool:
    """ISO 7064 MOD 11,10: German tax identification numbers."""
    product = 10
    for digit in digits[:-1]:
        product = ((product + int(digit)) % 10 or 10) * 2 % 11
    return (11 - product) % 10 == int(digits[-1])


def verhoeff(digits: str) -> bool:
    """Verhoeff's scheme: Indian Aadhaar numbers."""
    state = 0
    for position, digit in enumerate(reversed(digits)):
        number = int(digit)
        for _ in range(position % 8):
            number = _PERMUTED[number]
        state = _PRODUCT[state][number]
    return state == 0


def weighted(digits: str, weights: Sequence[int]) -> int:
    """Sum of digit times weight."""
    return sum(int(digit) * weight for digit, weight in zip(digits, weights, strict=False))


def weighted_letters(characters: str) -> int:
    """ICAO Doc 9303: weights 7, 3, 1; A is 10."""
    return sum(int(each, 36) * (7, 3, 1)[place % 3] for place, each in enumerate(characters))


def is_date(year: str, month: str, day: str) -> bool:
    """Whether this day exists; a year of two digits may be of any century."""
    try:
        datetime.date(int(year) if len(year) == 4 else 2000 + int(year), int(month), int(day))
    except ValueError:
        return False
    return len(year) != 4 or 1850 <= int(year) <= 2100
