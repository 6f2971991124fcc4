"""Whether the digits of a national number are right: one function a number.

Each takes the number without separators. Sources are the issuing registries.
"""

from __future__ import annotations

from mds_data.privacy.checksums import is_date, luhn, mod11_2, mod11_10, verhoeff, weighted

__all__ = [
    "aadhaar",
    "ahv",
    "baltic",
    "belgium",
    "bsn",
    "china",
    "cnp",
    "cnpj",
    "cpf",
    "cuit",
    "denmark",
    "egn",
    "inn",
    "japan",
    "korea",
    "nhs",
    "nir",
    "norway",
    "pesel",
    "portugal",
    "rodne_cislo",
    "sin",
    "snils",
    "south_africa",
    "steuer",
    "sweden",
    "tfn",
    "turkey",
    "us",
    "us_itin",
    "us_ssn",
]


def us_ssn(d: str) -> bool:
    """United States, social security: some areas and groups were never given out (SSA)."""
    return d[:3] not in ("000", "666") and d[0] != "9" and d[3:5] != "00" and d[5:] != "0000"


def us_itin(d: str) -> bool:
    """United States, taxpayers without a social security number (IRS)."""
    return d[0] == "9" and 50 <= int(d[3:5]) <= 99


def us(d: str) -> bool:
    """Either of the two numbers of the United States."""
    return us_ssn(d) or us_itin(d)


def china(d: str) -> bool:
    """China (GB 11643): division, date of birth, check."""
    return "11" <= d[:2] <= "91" and is_date(d[6:10], d[10:12], d[12:14]) and mod11_2(d)


def cpf(d: str) -> bool:
    """Brazil, persons (Receita Federal)."""
    if len(set(d)) == 1:
        return False
    first = weighted(d[:9], range(10, 1, -1)) * 10 % 11 % 10
    second = weighted(d[:10], range(11, 1, -1)) * 10 % 11 % 10
    return d[9:] == f"{first}{second}"


def cnpj(d: str) -> bool:
    """Brazil, companies (Receita Federal)."""
    weights = (6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2)
    first = -weighted(d[:12], weights[1:]) % 11
    second = -weighted(d[:13], weights) % 11
    return d[12:] == f"{first % 10}{second % 10}" and len(set(d)) > 1


def nir(d: str) -> bool:
    """France; Corsica's 2A and 2B count as 19 and 18 (INSEE)."""
    digits = d.replace("2A", "19").replace("2B", "18")
    if not digits.isdigit() or digits[0] not in "123478":
        return False
    month = int(digits[3:5])
    plausible = 1 <= month <= 12 or 20 <= month <= 42 or month >= 50
    return plausible and 97 - int(digits[:13]) % 97 == int(digits[13:])


def steuer(d: str) -> bool:
    """Germany: one or two digits occur more than once among the first ten."""
    return d[0] != "0" and len(set(d[:10])) in (8, 9) and mod11_10(d)


def aadhaar(d: str) -> bool:
    """India (UIDAI)."""
    return d[0] not in "01" and verhoeff(d) and len(set(d)) > 2


def nhs(d: str) -> bool:
    """England's health service: a remainder that would give 10 is not used."""
    check = 11 - weighted(d[:9], range(10, 1, -1)) % 11
    return check % 11 == int(d[9]) and check != 10


def sin(d: str) -> bool:
    """Canada: 0 and 8 begin no person's number."""
    return d[0] not in "08" and luhn(d)


def tfn(d: str) -> bool:
    """Australia, tax (ATO)."""
    return weighted(d, (1, 4, 3, 7, 5, 8, 6, 9, 10)) % 11 == 0


def bsn(d: str) -> bool:
    """Netherlands: the test of eleven, in which the last digit counts minus one."""
    return weighted(d, (9, 8, 7, 6, 5, 4, 3, 2, -1)) % 11 == 0 and d[:3] != "000"


def pesel(d: str) -> bool:
    """Poland: 20, 40 ... added to the month tell the century."""
    month = int(d[2:4]) % 20
    check = -weighted(d[:10], (1, 3, 7, 9, 1, 3, 7, 9, 1, 3)) % 10
    return is_date(d[:2], str(month), d[4:6]) and check == int(d[10])


def turkey(d: str) -> bool:
    """Turkey (NVI)."""
    numbers = [int(digit) for digit in d]
    tenth = (7 * sum(numbers[0:9:2]) - sum(numbers[1:8:2])) % 10
    return d[0] != "0" and tenth == numbers[9] and sum(numbers[:10]) % 10 == numbers[10]


def south_africa(d: str) -> bool:
    """South Africa: date of birth, sequence, citizenship."""
    return is_date(d[:2], d[2:4], d[4:6]) and d[10] in "012" and luhn(d)


def sweden(d: str) -> bool:
    """Sweden (Skatteverket): date of birth and Luhn over the last ten digits."""
    ten = d[-10:]
    day = int(ten[4:6]) % 60  # coordination numbers add 60
    return is_date(ten[:2], ten[2:4], str(day)) and luhn(ten)


def korea(d: str) -> bool:
    """South Korea: date of birth, century and sex; the rest is random since October 2020."""
    if not is_date(d[:2], d[2:4], d[4:6]) or d[6] not in "12345678":
        return False
    check = (11 - weighted(d[:12], (2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5)) % 11) % 10
    return check == int(d[12]) or (d[6] in "3478" and int(d[:2]) >= 20)


def ahv(d: str) -> bool:
    """Switzerland: 756 and the check digit of EAN-13."""
    return d[:3] == "756" and sum(int(c) * (3 if i % 2 else 1) for i, c in enumerate(d)) % 10 == 0


def belgium(d: str) -> bool:
    """Belgium: those born since 2000 count with a 2 in front."""
    base = int(d[:9])
    return int(d[9:]) in (97 - base % 97, 97 - (2_000_000_000 + base) % 97) and int(d[2:4]) <= 52


def japan(d: str) -> bool:
    """Japan, My Number."""
    weights = (6, 5, 4, 3, 2, 7, 6, 5, 4, 3, 2)
    rest = weighted(d[:11], weights) % 11
    return (0 if rest <= 1 else 11 - rest) == int(d[11])


def norway(d: str) -> bool:
    """Norway: date of birth (40 more for D numbers), two check digits."""
    first = -weighted(d[:9], (3, 7, 6, 1, 8, 9, 4, 5, 2)) % 11
    second = -weighted(d[:10], (5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return is_date(d[4:6], d[2:4], str(int(d[:2]) % 40)) and d[9:] == f"{first}{second}"


def denmark(d: str) -> bool:
    """Denmark: only the date can be checked since 2007."""
    return is_date(d[4:6], d[2:4], d[:2])


def snils(d: str) -> bool:
    """Russia, pension insurance."""
    return weighted(d[:9], range(9, 0, -1)) % 101 % 100 == int(d[9:])


def cuit(d: str) -> bool:
    """Argentina (AFIP): the first two digits tell persons and companies; 9 stands for 10."""
    check = -weighted(d, (5, 4, 3, 2, 7, 6, 5, 4, 3, 2)) % 11
    return d[:2] in ("20", "23", "24", "27", "30", "33", "34") and min(check, 9) == int(d[10])


def egn(d: str) -> bool:
    """Bulgaria (GRAO): 20 or 40 added to the month tell the century."""
    check = weighted(d, (2, 4, 8, 5, 10, 9, 7, 3, 6)) % 11 % 10
    return is_date(d[:2], str(int(d[2:4]) % 20), d[4:6]) and check == int(d[9])


def rodne_cislo(d: str) -> bool:
    """Czechia and Slovakia: women's months have 50 more, 20 more where a day's numbers ran out."""
    month = int(d[2:4]) % 50 % 20
    return is_date(d[:2], str(month), d[4:6]) and int(d[:9]) % 11 % 10 == int(d[9])


def baltic(d: str) -> bool:
    """Estonia and Lithuania: a second row of weights where the first leaves 10."""
    rest = weighted(d, (1, 2, 3, 4, 5, 6, 7, 8, 9, 1)) % 11
    if rest == 10:
        rest = weighted(d, (3, 4, 5, 6, 7, 8, 9, 1, 2, 3)) % 11 % 10
    return d[0] in "3456" and is_date(d[1:3], d[3:5], d[5:7]) and rest == int(d[10])


def cnp(d: str) -> bool:
    """Romania (Law 105/1996)."""
    rest = weighted(d, (2, 7, 9, 1, 4, 6, 3, 5, 8, 2, 7, 9)) % 11
    return d[0] != "0" and is_date(d[1:3], d[3:5], d[5:7]) and rest % 10 + rest // 10 == int(d[12])


def inn(d: str) -> bool:
    """Russia: a person's tax number."""
    weights = (3, 7, 2, 4, 10, 3, 5, 9, 4, 6, 8)
    first = weighted(d, weights[1:]) % 11 % 10
    return d[10:] == f"{first}{weighted(d, weights) % 11 % 10}"


def portugal(d: str) -> bool:
    """Portugal, tax: 1 to 3 begin persons' numbers."""
    check = -weighted(d, range(9, 1, -1)) % 11
    return d[0] in "123" and (check if check < 10 else 0) == int(d[8])
