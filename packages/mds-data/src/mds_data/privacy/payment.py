"""Payment cards in any layout, bank accounts (IBAN) and addresses of crypto currencies."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

from mds_data.privacy.checksums import luhn, mod97
from mds_data.privacy.findings import Finding, is_word

__all__ = ["broken_card", "find_crypto", "find_iban", "is_card", "names_another_number"]

# First digits and lengths, from ISO/IEC 7812's registry as the networks publish them.
_CARD = re.compile(
    r"4\d{12}(?:\d{3}){0,2}"  # Visa: 13, 16, 19
    r"|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}"  # Mastercard
    r"|3[47]\d{13}"  # American Express
    r"|3(?:0[0-5]|[689]\d)\d{11,16}"  # Diners Club
    r"|6(?:011|5\d\d|4[4-9]\d)\d{12,15}"  # Discover
    r"|35(?:2[89]|[3-8]\d)\d{12}"  # JCB
    r"|62\d{14,17}"  # UnionPay
    r"|(?:50|5[6-9]|6[0-9])\d{11,17}"  # Maestro, RuPay, Elo
    r"|220[0-5]\d{12}"  # Mir, Borica
    r"|9792\d{12}|(?:8600|9860)\d{12}"  # Troy, Uzcard, Humo
)

# Country and length of its IBAN, from the registry of SWIFT.
_IBAN_REGISTRY = """
AD:24 AE:23 AL:28 AT:20 AZ:28 BA:20 BE:16 BG:22 BH:22 BI:27 BR:29 BY:28 CH:21 CR:22 CY:28 CZ:24
DE:22 DJ:27 DK:18 DO:28 EE:20 EG:29 ES:24 FI:18 FK:18 FO:18 FR:27 GB:22 GE:22 GI:23 GL:18 GR:27
GT:28 HR:21 HU:28 IE:22 IL:23 IQ:23 IS:26 IT:27 JO:30 KW:30 KZ:20 LB:28 LC:32 LI:21 LT:20 LU:20
LV:21 LY:25 MC:27 MD:24 ME:22 MK:19 MN:20 MR:27 MT:31 MU:30 NI:28 NL:18 NO:15 OM:23 PK:24 PL:28
PS:29 PT:25 QA:29 RO:24 RS:22 RU:33 SA:24 SC:31 SD:18 SE:24 SI:19 SK:24 SM:27 SO:23 ST:25 SV:28
TL:23 TN:24 TR:26 UA:29 VA:22 VG:24 XK:20 YE:30
"""
_IBAN_LENGTHS = {entry[:2]: int(entry[3:]) for entry in _IBAN_REGISTRY.split()}
_ONLY_DIGITS = frozenset(
    """
    AE AT BA BE BI CR CZ DE DJ DK EE EG ES FI FO GL HR HU IL IS LT LY ME MN MR NO PL PT RS SD SE
    SI SK SO ST TL TN VA XK
    """.split()  # noqa: SIM905 - forty strings would hide the list
)
"""Countries whose accounts have no letters behind the country's."""
_IBAN_DIGITS = re.compile(r"\d\d(?=[ \-./\u00a0\u2009\u202f]?[A-Za-z0-9]{2})")
_IBAN_COUNTRY = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=IBAN|iban))(?:[A-Z]{2}|[a-z]{2})[ \-\u00a0\u202f]?\Z"
)

_BASE58 = re.compile(r"[13][1-9A-HJ-NP-Za-km-z]{25,34}(?![A-Za-z0-9])")
_BASE58_DIGITS = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BECH32 = re.compile(r"(?<![A-Za-z0-9])(bc|tb|ltc)1([02-9ac-hj-np-z]{11,71})(?![A-Za-z0-9])")
_BECH32_DIGITS = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
_HEX_ADDRESS = re.compile(r"(?<![A-Za-z0-9])0x[0-9a-fA-F]{40}(?![A-Za-z0-9])")


def is_card(digits: str) -> bool:
    """Whether these 12 to 19 digits are a payment card's number: issuer, length and Luhn."""
    return _CARD.fullmatch(digits) is not None and len(set(digits)) > 1 and luhn(digits)


_CARD_IN_LINES = re.compile(
    r"(?<![\d.,])\d{4}(?:[ \t\-\u00b7]{0,2}\r?\n?[ \t>]{0,4}\d{4}){3}(?!\d|[.,]\d)"
)


def broken_card(text: str, start: int) -> Finding | None:
    """The card that begins here, in fours with tabs, dots or line breaks between them.

    A column of numbers is none.
    """
    match = _CARD_IN_LINES.match(text, start)
    if match is None or text[max(0, start - 12) : start].rstrip()[-1:].isdigit():
        return None
    if text[match.end() : match.end() + 12].lstrip()[:1].isdigit():
        return None
    digits = "".join(filter(str.isdigit, match[0]))
    return Finding(start, match.end(), "CARD") if is_card(digits) else None


_OTHER_NUMBER = re.compile(
    r"(?:isbn|issn|ean|gtin|upc|imei|iccid|barcode|tracking|serial|asin|doi|oclc|pmid|epoch"
    r"|timestamp|seed)[a-z]{0,6}(?:[ \-]?1[034])?[ :=#.\-]{0,3}(?:is )?\Z",
    re.IGNORECASE,
)


def names_another_number(before: str) -> bool:
    """Whether the words before digits say that they are no card: a book, a parcel, a time."""
    return _OTHER_NUMBER.search(before) is not None


def find_iban(text: str) -> Iterator[Finding]:
    """Bank account numbers, in groups or not, with a right length and checksum."""
    for digits in _IBAN_DIGITS.finditer(text):
        country = _IBAN_COUNTRY.search(text, max(0, digits.start() - 4), digits.start())
        if country is None:
            continue
        length = _IBAN_LENGTHS.get(country[0][:2].upper())
        start = country.start()
        end = None if length is None else _end_of_characters(text, start, count=length)
        if end is None or is_word(text[end : end + 1]):
            continue
        characters = "".join(filter(str.isalnum, text[start:end]))
        if country[0][:2].upper() in _ONLY_DIGITS and not characters[2:].isdecimal():
            continue
        if characters.isascii() and mod97(characters):
            yield Finding(start, end, "IBAN")


def _end_of_characters(text: str, start: int, *, count: int) -> int | None:
    """Where ``count`` letters and digits end, with at most one separator between two of them."""
    gap = 0
    for position in range(start, min(len(text), start + 2 * count)):
        if is_word(text[position]):
            gap = 0
            count -= 1
            if not count:
                return position + 1
        elif gap or text[position] not in " -./\u00a0\u2009\u202f":
            return None
        else:
            gap = 1
    return None


def find_crypto(text: str) -> Iterator[Finding]:
    """Addresses: Bitcoin and its kin (base58check, bech32 with their checksums), Ethereum's."""
    for match in _HEX_ADDRESS.finditer(text) if "0x" in text else ():
        yield Finding(match.start(), match.end(), "CRYPTO")
    for match in _BASE58.finditer(text):
        if not is_word(text[match.start() - 1 : match.start()]) and _base58_is_right(match[0]):
            yield Finding(match.start(), match.end(), "CRYPTO")
    for match in _BECH32.finditer(text) if any(p in text for p in ("bc1", "tb1", "ltc1")) else ():
        if _bech32_is_right(match[1], match[2]):
            yield Finding(match.start(), match.end(), "CRYPTO")


def _base58_is_right(address: str) -> bool:
    number = 0
    for character in address:
        number = number * 58 + _BASE58_DIGITS.index(character)
    if number >= 1 << 200:
        return False
    raw = number.to_bytes(25, "big")
    digest = hashlib.sha256(hashlib.sha256(raw[:-4]).digest()).digest()
    return digest[:4] == raw[-4:]


def _bech32_is_right(prefix: str, data: str) -> bool:
    """The checksums of BIP 173 (1) and BIP 350 (0x2bc830a3)."""
    values = [ord(character) >> 5 for character in prefix] + [0]
    values += [ord(character) & 31 for character in prefix]
    values += [_BECH32_DIGITS.index(character) for character in data]
    checksum = 1
    for value in values:
        top = checksum >> 25
        checksum = (checksum & 0x1FFFFFF) << 5 ^ value
        for bit, generator in enumerate(
            (0x3B6A57B2, 0x26508E6D, 0x1EA119FA, 0x3D4233DD, 0x2A1462B3)
        ):
            checksum ^= generator if top >> bit & 1 else 0
    return checksum in (1, 0x2BC830A3)
