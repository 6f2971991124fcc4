"""Words that say that the number after them is a national identity number, or which one it is."""

from __future__ import annotations

import re

__all__ = ["names_a_number", "names_this_number"]

_WORDS = re.compile(
    r"(?:\bssn|social[ \-]?sec|national[ \-]?(?:id|ins)|\bnino\b|\bn\.?i\.?\b"
    r"|tax[ \-]?(?:id|file|payer|no|num)"
    r"|\btin\b|\bitin\b|\bnhs\b|\bsin\b|\btfn\b|\bbsn\b|\bcpf\b|\bcnpj\b|\bpan\b|aadhaa?r|\buid(?:ai)?\b"
    r"|\bnir\b|s[ée]cu(?:rit[ée])?\b|\bdni\b|\bnie\b|\bnif\b|\brut\b|\bcurp\b|\brfc\b|\bpesel\b|\bnip\b"
    r"|\bsteuer|\bidnr\b|ausweis|personn?(?:ummer|alnr|enr)|\bcpr\b|\bhetu\b|\bahv\b|\bavs\b|\bt\.?c\.?\b"
    r"|codice fiscale|\bc\. ?f\.|identi(?:ty|fica|f[iy]|t[ée])|\bid[ \-]?(?:card|number|no\b|nr)"
    r"|resident|citizen|burgerservice|rijksregister|\binsz\b|num[ée]ro national"
    r"|registre national"  # codespell:ignore registre
    r"|personnr|\bpnr\b|f[øo]dselsn|isikukood|asmens kod|rodn[ée] [čc]|r\. ?[čc]\."
    r"|\boib\b|\bppsn?\b"
    r"|\bегн\b"  # noqa: RUF001
    r"|\bcnp\b|cod numeric|kimlik|\btckn\b|\bcui[tl]\b|contribuinte|\bnas\b|zehut|\bhkid\b"
    r"|(?-i:My ?Number)(?! is)|my ?number(?! is|:)|c[ée]dula|south afric|\b(?:sa|rsa) id\b"
    r"|social ins|आधार|תעודת|זהות"
    r"|身份证|身分證|身份證|证件|公民|号码|個人番号|マイナンバー|주민|инн|снилс|passport"
    r"|ss#|soc\.? ?sec)"
    r"[^\n]{0,32}\Z",
    re.IGNORECASE,
)


def names_a_number(before: str) -> bool:
    """Whether the words before a number (about 48 characters) say that it is an identity number."""
    return _WORDS.search(before) is not None


# The names of single numbers, by how many digits these have. After such a name a number counts
# with a wrong checksum, too: people mistype, and some registries have given checksums up.
_THIS_NUMBER = {
    9: re.compile(r"(?:\bssn\b|social security|\bbsn\b|burgerservice|\bsin\b|social insurance)"),
    10: re.compile(r"(?:\bnhs\b)"),
    11: re.compile(r"(?:\bcpf\b|\bpesel\b|steuer-?id|\bidnr\b|kimlik|\btckn\b|f[øo]dselsn)"),
    12: re.compile(r"(?:aadhaa?r|\buidai\b|आधार|マイナンバー|個人番号)"),
    13: re.compile(r"(?:주민|\brrn\b|\bcnp\b)"),
    14: re.compile(r"(?:\bcnpj\b)"),
    15: re.compile(r"(?:\bnir\b|s[ée]curit[ée] sociale)"),
    18: re.compile(r"(?:身份证|身份證|身分證|公民)"),
}
_TO_NUMBER = re.compile(
    r"[^\W\d]{0,12}[ \t]?(?:n[o°ºr]|num\w{0,4}|is|ist|号码?|是)?"  # codespell:ignore ist
    r"[ \t.:#=\"'\uff1a]{0,5}\Z"
)


def names_this_number(before: str, digits: str) -> bool:
    """Whether the word right before a number names it, and it has as many digits as it should."""
    words = _THIS_NUMBER.get(len(digits))
    if words is None or len(set(digits)) < 3:
        return False
    before = before.lower()
    return any(_TO_NUMBER.match(before, word.end()) for word in words.finditer(before))
