"""National identity, tax and social-security numbers: one rule a number, checked by its checksum.

A rule knows how the number is written, what its check digits are, and whether the digits alone are
enough: where a checksum is weak or missing, a word before the number must name it. Sources are the
issuing registries; ISO 7064, Luhn and Verhoeff where they use them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mds_data.privacy import national_checks as check
from mds_data.privacy import national_letters as letters
from mds_data.privacy.checksums import luhn, mod11_10

__all__ = ["DIGIT_RULES", "LETTER_RULES", "Rule"]


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


def _rule(country: str, shape: str, check: Callable[[str], bool], bare: str | None = None) -> Rule:
    return Rule(country, re.compile(shape), check, None if bare is None else re.compile(bare))


_FISCALE = (
    r"[A-Z]{6}\d\d[A-EHLMPRST]\d\d[A-Z]\d{3}[A-Z]|[a-z]{6}\d\d[a-ehlmprst]\d\d[a-z]\d{3}[a-z]"
)
_CPF = r"\d{11}|\d{9}[\-/]\d\d|\d{3}\.\d{3}\.\d{3}[\-/]?\d\d|\d{3} \d{3} \d{3} \d\d"
_S = r"[ .\-\u2010-\u2013/\u00a0\u202f]"  # between groups

DIGIT_RULES: tuple[Rule, ...] = (
    _rule("CN", rf"\d{{6}}{_S}?\d{{8}}{_S}?\d{{3}}[\dXx]", check.china),
    _rule("US", r"\d{3}([\-\u2010-\u2013 ])\d{2}\1\d{4}", check.us, r"\d{9}|\d{3}\.\d\d\.\d{4}"),
    _rule("BR", _CPF, check.cpf),
    _rule("BR", r"\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}", check.cnpj, r"\d{14}"),
    _rule(
        "FR",
        rf"[1-8]{_S}?\d\d{_S}?\d\d{_S}?(?:\d\d|2[AB]){_S}?\d{{3}}{_S}?\d{{3}}{_S}{{0,3}}\d\d",
        check.nir,
    ),
    _rule("DE", r"\d{2} ?\d{3} ?\d{3} ?\d{3}|\d{2}/\d{3}/\d{3}/\d{3}", check.steuer),
    _rule("IN", r"\d{4} \d{4} \d{4}", check.aadhaar, r"\d{12}|\d{4}-\d{4}-\d{4}"),
    _rule("KR", r"\d{6}-\d{7}", check.korea, r"\d{13}"),
    _rule("CH", r"756\.?\d{4}\.?\d{4}\.?\d{2}", check.ahv),
    _rule("ZA", r"\d{6} ?\d{4} ?\d{3}", check.south_africa),
    _rule("SE", r"(?:19|20)?\d{6}[\-+]\d{4}", check.sweden, r"(?:19|20)?\d{10}"),
    _rule("FI", r"\d{6}[\-+]\d{4}", letters.hetu),
    _rule("PL", r"\d{11}", check.pesel),
    _rule("NO", r"\d{6} ?\d{5}", check.norway),
    _rule("BE", r"\d\d\.\d\d\.\d\d-\d{3}\.\d\d", check.belgium, r"\d{11}"),
    _rule("RU", r"\d{3}-\d{3}-\d{3} \d\d", check.snils, r"\d{11}"),
    _rule("TR", r"(?!)", check.turkey, r"\d{11}"),
    _rule("GB", r"(?!)", check.nhs, r"\d{3}[ \-]?\d{3}[ \-]?\d{4}"),
    _rule("CA", r"\d{3}-\d{3}-\d{3}", check.sin, r"\d{3} ?\d{3} ?\d{3}"),
    _rule("AU", r"(?!)", check.tfn, r"\d{3} ?\d{3} ?\d{3}"),
    _rule("NL", r"(?!)", check.bsn, r"\d{9}|\d{4}[. ]\d\d[. ]\d{3}|\d{3}[. ]\d{3}[. ]\d{3}"),
    _rule("DK", r"(?!)", check.denmark, r"\d{6}-?\d{4}"),
    _rule("JP", r"(?!)", check.japan, r"\d{4}[ \-]?\d{4}[ \-]?\d{4}"),
    _rule("CL", r"\d{1,2}\.\d{3}\.\d{3}-\d", letters.rut, r"\d{7,8}-\d"),
    _rule("AR", r"\d{2}-\d{8}-\d", check.cuit, r"\d{11}"),
    _rule("CZ", r"\d{6}/\d{4}", check.rodne_cislo, r"\d{10}"),
    _rule("BG", r"(?!)", check.egn, r"\d{10}"),
    _rule("EE", r"(?!)", check.baltic, r"\d{11}"),
    _rule("RO", r"(?!)", check.cnp, r"\d{13}"),
    _rule("HR", r"(?!)", mod11_10, r"\d{11}"),
    _rule("IL", r"(?!)", luhn, r"\d{8}-?\d"),
    _rule("PT", r"(?!)", check.portugal, r"\d{3} ?\d{3} ?\d{3}"),
    _rule("RU", r"(?!)", check.inn, r"\d{12}"),
)
"""Numbers that consist of digits (China's may end in X)."""

LETTER_RULES: tuple[Rule, ...] = (
    _rule("GB", r"[A-Z]{2} ?\d\d ?\d\d ?\d\d ?[A-D]|[A-Z]{2}(-\d\d){3}-[A-D]", letters.nino),
    _rule("GB", r"(?!)", letters.nino_temporary, r"[A-Z]{2} ?\d\d ?\d\d ?\d\d ?[A-Z]"),
    _rule("IN", r"[A-Z]{5}\d{4}[A-Z]", letters.pan),
    _rule("ES", r"\d{8}-?[A-Z]|[XYZ]-?\d{7}-?[A-Z]", letters.dni),
    _rule("IT", _FISCALE, letters.fiscale),
    _rule("MX", r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[A-Z\d]\d", letters.curp),
    _rule("SG", r"[STFG]\d{7}[A-Z]", letters.nric),
    _rule("TW", r"[A-Z][12]\d{8}", letters.taiwan),
    _rule("FI", r"\d{6}[\-+A]\d{3}[0-9A-Y]", letters.hetu),
    _rule("CL", r"\d{1,2}\.?\d{3}\.?\d{3}-K", letters.rut),
    _rule("IE", r"(?!)", letters.pps, r"\d{7}[A-W][A-IW]?"),
    _rule("HK", r"[A-Z]{1,2}\d{6}\([\dA]\)", letters.hkid),
    _rule(
        "FR", rf"[12]{_S}?\d\d{_S}?\d\d{_S}?2[AB]{_S}?\d{{3}}{_S}?\d{{3}}{_S}{{0,3}}\d\d", check.nir
    ),
)
"""Numbers in which letters stand among the digits."""
