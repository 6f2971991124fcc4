"""Keys, tokens, passwords and connection strings, told by what their issuers put in front.

Each pattern is tried only where a literal part of it stands in the text, so that ordinary text
costs a few substring searches.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

from mds_data.privacy.findings import Finding, lower, present

__all__ = ["find_secrets"]

_LEFT = r"(?<![A-Za-z0-9_])"
_RIGHT = r"(?![A-Za-z0-9_])"


def _pattern(literals: str, pattern: str) -> tuple[tuple[str, ...], re.Pattern[str]]:
    return tuple(literals.split()), re.compile(pattern)


# Literal parts, one of which must be there; and the whole. Forms as the issuers document them.
# Keys are single long words, so they are looked for in the long words of the text first.
_SHORTEST_KEY = 15
_KEYS = (
    _pattern("AKIA ASIA AGPA AROA AIDA AKID LTAI", (
        rf"{_LEFT}(?:A(?:KI|SI|GP|RO|ID)A[A-Z2-7]{{16}}|AKID[A-Za-z0-9]{{32}}|LTAI[A-Za-z0-9]{{12,20}}){_RIGHT}"
    )),
    _pattern("ghp_ gho_ ghu_ ghs_ ghr_", rf"{_LEFT}gh[pousr]_[A-Za-z0-9]{{30,255}}{_RIGHT}"),
    _pattern("github_pat_", rf"{_LEFT}github_pat_[A-Za-z0-9_]{{22,255}}"),
    _pattern("glpat- gldt- glrt- glptt-", rf"{_LEFT}gl(?:pat|dt|rt|ptt)-[\w\-]{{20,64}}"),
    _pattern("xox", rf"{_LEFT}xox[abeoprs]-[A-Za-z0-9\-]{{10,250}}"),
    _pattern("xapp-", rf"{_LEFT}xapp-\d-[A-Za-z0-9\-]{{20,250}}"),
    _pattern("_live_ _test_", rf"{_LEFT}(?:sk|rk|pk|whsec)_(?:live|test)_[A-Za-z0-9]{{16,250}}"),
    _pattern("whsec_", rf"{_LEFT}whsec_[A-Za-z0-9+/=]{{20,100}}"),
    _pattern("sk-", rf"{_LEFT}sk-(?:ant-|proj-|svcacct-|or-)?[A-Za-z0-9_\-]{{20,250}}"),
    _pattern("AIza", rf"{_LEFT}AIza[\w\-]{{35}}"),
    _pattern("ya29.", rf"{_LEFT}ya29\.[\w\-]{{20,250}}"),
    _pattern("GOCSPX-", rf"{_LEFT}GOCSPX-[\w\-]{{24,32}}"),
    _pattern("eyJ", rf"{_LEFT}eyJ[\w\-]{{8,}}\.[\w\-]{{8,}}(?:\.[\w\-]{{8,}})*"),
    _pattern("npm_", rf"{_LEFT}npm_[A-Za-z0-9]{{30,50}}{_RIGHT}"),
    _pattern("pypi-", rf"{_LEFT}pypi-[\w\-]{{16,250}}"),
    _pattern("hf_", rf"{_LEFT}hf_[A-Za-z0-9]{{30,50}}{_RIGHT}"),
    _pattern("SG.", rf"{_LEFT}SG\.[\w\-]{{16,32}}\.[\w\-]{{16,64}}"),
    _pattern("key-", rf"{_LEFT}key-[0-9a-f]{{32}}{_RIGHT}"),
    _pattern("shp", rf"{_LEFT}shp(?:at|ca|pa|ss)_[A-Fa-f0-9]{{32}}{_RIGHT}"),
    _pattern("dop_v1_ doo_v1_ dor_v1_", rf"{_LEFT}do[opr]_v1_[a-f0-9]{{64}}{_RIGHT}"),
    _pattern("dckr_ dapi lin_api_ rubygems_ sq0 EAAA", (
        rf"{_LEFT}(?:dckr_(?:pat|oat)_[\w\-]{{20,64}}|dapi[a-f0-9]{{32}}(?:-\d)?|lin_api_\w{{32,64}}"
        rf"|rubygems_[a-f0-9]{{48}}|sq0(?:atp|csp)-[\w\-]{{22,43}}|EAAA[\w\-]{{60}}){_RIGHT}"
    )),
    _pattern("hvs. hvb.", rf"{_LEFT}hv[sb]\.[\w\-]{{24,250}}"),
    _pattern("AC SK", rf"{_LEFT}(?:AC|SK)[a-f0-9]{{32}}{_RIGHT}"),
    _pattern("tfp_ nvapi- gsk_ r8_ glsa_ PMAK- NRAK- atlasv1. ATATT3", (
        rf"{_LEFT}(?:tfp_[\w\-]{{40,80}}|nvapi-[\w\-]{{60,80}}|gsk_[A-Za-z0-9]{{40,64}}|r8_[A-Za-z0-9]{{37}}"
        rf"|glsa_\w{{32,48}}|PMAK-[a-f0-9]{{24}}-[a-f0-9]{{34}}|NRAK-[A-Z0-9]{{27}}"
        r"|[A-Za-z0-9]{14}\.atlasv1\.[\w\-]{60,70}|ATATT3[\w\-=]{100,250})"
    )),
    _pattern("EAA figd_ pplx- xai- sbp_ ntn_ xkeysib- sntrys_ tskey- ops_eyJ tvly-", (
        rf"{_LEFT}(?:EAA[A-Za-z0-9]{{90,250}}|figd_[\w\-]{{38,45}}|pplx-[A-Za-z0-9]{{40,64}}"
        r"|xai-[A-Za-z0-9]{70,90}|sbp_[a-f0-9]{40}|ntn_[A-Za-z0-9]{40,50}|tvly-[A-Za-z0-9\-]{24,48}"
        r"|xkeysib-[a-f0-9]{64}-[A-Za-z0-9]{16}|sntrys_[A-Za-z0-9+/=_]{40,250}"
        r"|tskey-[a-z]{3,10}-[A-Za-z0-9]{8,20}-[A-Za-z0-9]{20,40}"
        rf"|ops_eyJ[A-Za-z0-9+/=]{{200,1500}}){_RIGHT}"
    )),
    _pattern("-us", rf"{_LEFT}[0-9a-f]{{32}}-us\d{{1,2}}{_RIGHT}"),  # Mailchimp
    _pattern("Q~", rf"{_LEFT}[\w.~\-]{{3}}\dQ~[\w.~\-]{{31,34}}(?![\w~])"),  # Microsoft Entra
    _pattern("secret_ CCIPAT_ oy2", (
        rf"{_LEFT}(?:secret_[A-Za-z0-9]{{43}}|CCIPAT_[A-Za-z0-9]{{22}}_[a-f0-9]{{40}}"
        rf"|oy2[a-z0-9]{{43}}){_RIGHT}"  # Notion, CircleCI, NuGet
    )),
    # A PEM block in base64, as Kubernetes keeps it, unless it is a certificate or a public key.
    _pattern("LS0tLS1CRUdJTi", (
        r"LS0tLS1CRUdJTi(?!BDRVJUSUZJQ0FU|BQVUJMSUMg)[A-Za-z0-9+/]{40,16384}={0,2}"
    )),
    _pattern("dp.", rf"dp\.[a-z]{{2,5}}\.[A-Za-z0-9]{{40,44}}{_RIGHT}"),
    _pattern("pat", rf"pat[A-Za-z0-9]{{14}}\.[a-f0-9]{{64}}{_RIGHT}"),
    _pattern(":AA", r"(?<![A-Za-z0-9])\d{8,10}:AA[\w\-]{32,34}(?![\w\-])"),
    _pattern("hooks.slack.com", r"(?:https?://)?hooks\.slack\.com/(?:services|workflows)/[\w/+\-]{20,}"),
    _pattern("/api/webhooks/", r"(?:https?://)?(?:\w+\.)?discord(?:app)?\.com/api/webhooks/\d+/[\w\-]{20,}"),
    _pattern("webhook.office", r"https://[\w.\-]*webhook\.office(?:365)?\.com/webhookb2/[\w@/\-]{20,}"),
    _pattern("AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[02-9AC-HJ-NP-Z]{58}"),
    _pattern("Key=", (
        r"(?:(?:DefaultEndpointsProtocol|AccountName|Endpoint|BlobEndpoint|EndpointSuffix|HostName|"
        r"SharedAccessKeyName|EntityPath|SharedAccessKey|AccountKey|AccountEndpoint)=[^;\s\"']{1,200};?)+"
    )),
    _pattern("sessionid= session_id= sessid= SESSID= SESSIONID=", (
        r"(?i:\b(?:php|j|asp\.net_)?sess(?:ion)?_?id)=(?P<value>[A-Za-z0-9%._\-]{16,256})"
    )),
    _pattern("sig=", r"(?<=[?&])sig=[A-Za-z0-9%+/=_\-]{32,}"),
)  # fmt: skip
# Discord: nothing marks it but its three parts.
_THREE_PARTS = re.compile(
    r"(?<![\w.\-])[MNO](?=[\w\-]{0,26}\d)[\w\-]{23,27}\.[\w\-]{6}"
    r"\.(?=[\w\-]{0,39}\d)[\w\-]{27,40}(?![\w.\-])"
)
_PHRASES = (
    _pattern("-----BEGIN", (
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:[^-]|-(?!----)){0,16384}(?:-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)?"
    )),
    _pattern("PuTTY-User-Key-File", (
        r"PuTTY-User-Key-File-\d: .{1,40}\n(?:.{1,200}\n){4,200}?Private-MAC: [0-9a-f]+"
    )),
    _pattern("login", (
        r"\b(?:machine[ \t]+[\w.\-]{1,128}|default)\s{1,8}login\s{1,8}[^\s]{1,128}\s{1,8}"
        r"password[ \t](?P<value>\S{3,256})"  # .netrc
    )),
    _pattern("--pass", (
        r"--pass(?:word|wd|phrase)?[ \t](?P<value>(?=\S{0,64}\d)[^\s\"'`<>\[\]\-]\S{3,255})"
    )),
    (("-u ", "--user ", "--user="), re.compile(
        r"(?<!\S)(?:-u|--user)[ =][\"']?[\w.@\-]{1,64}:(?P<value>[^\s\"'`<>$]{6,256})"  # curl
    )),
    _pattern("ENV setenv", (
        r"\b(?:ENV|setenv)[ \t]+\w{0,40}(?:KEY|TOKEN|SECRET|PASS\w{0,5})[ \t]+"
        r"(?P<value>[^\s\"'`<>$]{6,256})"
    )),
    _pattern("identified IDENTIFIED", (
        r"(?i:\bidentified[ \t]+(?:with[ \t]+\w+[ \t]+)?by)[ \t]+'(?P<value>[^'\n]{4,256})'"
    )),
    _pattern("define(", (
        r"define\(\s{0,4}[\"']\w{0,40}(?:PASSWORD|SECRET|KEY|SALT|TOKEN)[\"']\s{0,4},\s{0,4}"
        r"(?P<quote>[\"'])(?P<value>[^\"'\n]{6,256})(?P=quote)"  # PHP
    )),
    _pattern("://", (
        r"(?<![A-Za-z0-9+.\-])[A-Za-z][A-Za-z0-9+._\-]{1,30}://"
        r"[^\s/:@\"'<>`]{0,128}:(?!//)[^\s/@\"'<>`]{1,256}@[^\s\"'<>`)\]}]{1,512}"
    )),
)  # fmt: skip

# The last word of a setting's name, what stands before it, and after it up to the value.
_PASSWORDS = (
    *("passw", "passphrase", "pwd"),
    "mot de passe",  # codespell:ignore mot
    *("contraseña", "senha", "kennwort", "hasło", "пароль"),
    *("密码", "密碼", "口令", "パスワード", "비밀번호"),
)
_NAMES = ("key", "token", "secret", "pass", "credential", "auth", *_PASSWORDS)
_KEY_BEFORE = re.compile(
    r"(?:api|access|secret|private|encryption|signing|account|master|shared|auth|subscription|client"
    r"|app|license|service|storage|deploy|consumer|session)[_\- ]?\Z",
    re.IGNORECASE,
)
_VALUE_AFTER = re.compile(
    r"(?:[_\- ]?(?:access[_\- ]?key|id|key|token|or[dt]|d|s|orization|code|data))?[\"']?"
    r"(?P<sign>[ \t]*(?:=>|:=|[:=\uff1a]|\b(?:is|es|lautet|to)t?\b|是|>(?=[^<\s]{4,256}</))"
    r"[ \t]*)"
    r"(?P<quote>[\"'`]?)(?P<value>[^\s\"'`<>,;]{6,4096})\s{0,2}?(?P=quote)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(?:[Bb]earer|Basic|Token)[ \t]+(?P<value>[A-Za-z0-9+/=_.~\-]{16,1024})")
_PLACEHOLDER = re.compile(
    r"(?:your|(?:my|the|some|input|type)(?!\w*\d)|example|sample|dummy|changeme|change_me|placeholder|redacted|xxx|\*{3}|\.{3}|<|\$\{?"
    r"|\{\{|%\(|%s|os\.|env|process\.|none\b|null\b|true\b|false\b|self\.|config|get|required|optional"
    r"|!?\$|string|str\b|int\b|bool\b|password|secret|token|insert|todo|enter|default)",
    re.IGNORECASE,
)
_LETTERS_AND_DIGITS = re.compile(r"(?=.*\d)(?=.*[^\W\d_])\w{6,32}")
_END_OF_LINE = re.compile(r"[ \t]{0,3}(?:\r?\n|\Z)")
_WORD_FOR_PASSWORD = re.compile(r"(?:proxy|user|db)?_?(?:pass(?:w(?:or)?d)?|pwd?)", re.IGNORECASE)


def find_secrets(text: str) -> Iterator[Finding]:
    """Keys by their form, URLs and connection strings with a password, values of named settings."""
    words = " ".join(word for word in text.split() if len(word) >= _SHORTEST_KEY)
    for literals, pattern in _KEYS if words else ():
        if any(literal in words for literal in literals) and pattern.search(words):
            yield from _matches(text, pattern)
    if _THREE_PARTS.search(words):
        yield from _matches(text, _THREE_PARTS)
    for literals, pattern in _PHRASES:
        if any(literal in text for literal in literals):
            yield from _matches(text, pattern)
    yield from _assigned(text)


def _matches(text: str, pattern: re.Pattern[str]) -> Iterator[Finding]:
    for match in pattern.finditer(text):
        if "value" in pattern.groupindex:
            if not _PLACEHOLDER.match(match["value"]):
                yield Finding(*match.span("value"), "SECRET")
        elif _is_real(match[0]):
            yield Finding(match.start(), _without_punctuation(match), "SECRET")


def _is_real(found: str) -> bool:
    """Not a template such as ``sk-xxxxxxxx`` or ``postgres://user:${PASSWORD}@host``."""
    if "://" in found and "@" in found:
        password = found.partition("://")[2].rpartition("@")[0].partition(":")[2]
        if _WORD_FOR_PASSWORD.fullmatch(password):
            return False
        return not _PLACEHOLDER.match(password) or password.lower().startswith("password1")
    return len(set(found)) >= 8 and not found.startswith("sk-learn")


def _without_punctuation(match: re.Match[str]) -> int:
    """The end, without the full stop or comma of the sentence around."""
    return match.start() + len(match[0].rstrip(".,;:!?" if "PRIVATE" not in match[0] else ""))


def _assigned(text: str) -> Iterator[Finding]:
    lowered = lower(text)
    for name in present(lowered, _NAMES, within="pass"):
        position = lowered.find(name)
        while position >= 0:
            match = _VALUE_AFTER.match(text, position + len(name))
            if match and _is_secret(match, name=name, position=position):
                yield Finding(match.start("value"), match.end("value"), "SECRET")
            position = lowered.find(name, position + 1)
    if any(word in text for word in ("earer ", "asic ", "oken ")):
        for match in _BEARER.finditer(text):
            if _is_random(match["value"]):
                yield Finding(match.start("value"), match.end("value"), "SECRET")


def _is_secret(match: re.Match[str], *, name: str, position: int) -> bool:
    """Whether the setting whose name has ``name`` at ``position`` is given a secret."""
    before = match.string[max(0, position - 16) : position]
    if match.string.startswith("PASS:", position) or not _is_setting(name, before):
        return False  # PASS: is the verdict of a test
    return _is_value(match) or (name in _PASSWORDS and _ends_line(match))


def _is_setting(name: str, before: str) -> bool:
    """``api_key`` names a secret, ``key`` and ``bypass`` do not."""
    if name == "key":
        return _KEY_BEFORE.search(before) is not None
    return name != "pass" or not before[-1:].isalpha()


def _is_value(match: re.Match[str]) -> bool:
    """Whether what a setting is given is a secret, not a word, a placeholder or an expression."""
    value, quoted, sign = match["value"], bool(match["quote"]), match["sign"].strip()
    if _PLACEHOLDER.match(value) or value.endswith(("(", ")", "}", "]")) or "(" in value:
        return False
    kinds = sum(
        any(map(test, value))
        for test in (str.islower, str.isupper, str.isdigit, lambda c: c in "!@#$%^&*?+~-_=/")
    )
    if not any(map(str.isdigit, value)) and not any(c in "!@#$%^&*?" for c in value):
        return quoted and _is_random(value)
    if sign not in ("=", ":=", "=>") and not quoted and kinds < 3:
        return _is_random(value)
    return kinds >= 2 and not value.replace(".", "").replace("-", "").isdigit()


def _ends_line(match: re.Match[str]) -> bool:
    """A password of letters and digits that nothing follows, as ``password: hunter2``."""
    value = match["value"]
    word = value.rstrip(".")
    return (
        _LETTERS_AND_DIGITS.fullmatch(word) is not None
        and _PLACEHOLDER.match(word) is None
        and (word != value or _END_OF_LINE.match(match.string, match.end()) is not None)
    )


def _is_random(value: str) -> bool:
    """Enough letters and digits, mixed more evenly than words are."""
    if len(value) < 16 or not any(map(str.isdigit, value)):
        return False
    counts = Counter(value)
    entropy = -sum(n / len(value) * math.log2(n / len(value)) for n in counts.values())
    return entropy >= 3.2
