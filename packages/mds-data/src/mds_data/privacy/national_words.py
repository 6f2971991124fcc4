"""Words that say that the number after them is a national identity number."""

from __future__ import annotations

import re

__all__ = ["names_a_number"]

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
    r"|my ?number(?! is|:)|c[ée]dula|south afric|social ins|आधार|תעודת|זהות"
    r"|身份证|身分證|身份證|证件|公民|号码|個人番号|マイナンバー|주민|инн|снилс|passport"
    r"|ss#|soc\.? ?sec)"
    r"[^\n]{0,32}\Z",
    re.IGNORECASE,
)


def names_a_number(before: str) -> bool:
    """Whether the words before a number (about 48 characters) say that it is an identity number."""
    return _WORDS.search(before) is not None
