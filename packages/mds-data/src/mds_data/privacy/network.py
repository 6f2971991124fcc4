"""E-mail and internet addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from mds_data.privacy.findings import Finding, is_word

__all__ = ["find_email", "find_ip"]

_LOCAL = re.compile(r"[\w.!#$%&'*+/=?^`{|}~\-]{1,64}\Z")
_QUOTED = re.compile(r'"[^"\n\\]{1,62}"\Z')
_DOMAIN = re.compile(
    r"(?:[^\W_](?:[\w\-]{0,61}[^\W_])?[.\u3002])+(?:xn--[a-z0-9\-]{2,59}|[^\W\d_]{2,63})(?![\w])",
    re.IGNORECASE,
)
_AT_SIGNS = ("@", "%40")
_AT_ENTITIES = ("&#64;", "&#x40;", "&commat;")
_LEADING = "!#$%&'*+/=?^`{|}~.-_"
_FILE_SUFFIXES = """
png jpg jpeg gif svg webp ico bmp css js ts py rb go rs c h cpp html htm json yaml yml xml txt
md pdf zip gz tar so exe dll
"""
_NOT_DOMAINS = frozenset(_FILE_SUFFIXES.split())
_PASSWORD_OF_URL = re.compile(r"://[^\s/:@]*:\Z")
_SERVICE = re.compile(r"(?:git|hg|svn)\Z", re.IGNORECASE)

_V4 = re.compile(
    r"(?<![A-Za-z0-9_.])(?:(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
    r"(?![A-Za-z0-9_]|\.\d)"
)
_V4_DASHED = re.compile(r"(?<![A-Za-z0-9])(?:ip|ec2)((?:-\d{1,3}){4})(?![\w\-])")
_V4_DEFANGED = re.compile(
    r"(?<![\w.])\d{1,3}(?:(?:\[\.\]|\(\.\)|\[dot\])\d{1,3}|\.\d{1,3}){3}(?!\w)"
)
_V4_WRITTEN_OTHERWISE = (
    (("ip-", "ec2-"), _V4_DASHED),
    (("[.]", "(.)", "[dot]"), _V4_DEFANGED),
)
_V4_SHAPE = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")
_VERSION_BEFORE = re.compile(
    r"(?:\bv|\bver\.?|versions?|release[ds]?|revision|rev\.?|build|section|sect\.?|sec\.?|§|chapter"
    r"|firmware|driver|(?:upgraded?|updated?|patch(?:ed)?|bump(?:ed)?)[^\n]{0,12} to|oid|kernel"
    r"|==|>=|<=|~=|\^)(?:s?[ \t][\d.]{3,12},?[ \t](?:and|or|to))?[ \t:=#(]{0,3}\Z",
    re.IGNORECASE,
)
_HEX = "0123456789abcdefABCDEF"
_V6_COLON = re.compile(r":(?=[0-9A-Fa-f]{1,4}:|:)")
_PORT_OR_PREFIX = re.compile(r":\d{2,5}(?!\d)|/(?:[89]|[12]\d|3[0-2])(?![\d/.])")
_REVISION = re.compile(r"[+~][A-Za-z0-9]|-\d{1,3}(?![\d.])")
_HOST_BEFORE = re.compile(
    r"(?:\bip|add?r|host|server|serveur|rechner|dns|gateway|proxy|peer|from|client|forwarded|ping|ssh|route|inet|://"
    r"|адрес|сервер|地址|服务器|アドレス|주소)[^\n]{0,12}\Z",
    re.IGNORECASE,
)
_V6_BODY = r"[0-9A-Fa-f:]{2,39}(?::(?:\d{1,3}\.){3}\d{1,3})?(?:%\w{1,15})?(?![A-Za-z0-9_:]|\.\d)"
_V6_RUN = re.compile(rf"(?<![A-Za-z0-9_:.]){_V6_BODY}")
_V6_LABELLED = re.compile(rf"(?<=[^\W_]:){_V6_BODY}")

# Addresses spelt out: "name (at) example [dot] com", "name at example dot com".
_SPELT_AT = re.compile(
    r"[ \t]{0,2}[\[({<][ \t]?(?:at|@)[ \t]?[\])}>][ \t]{0,2}|[ \t]{1,2}(?:at|@)[ \t]{1,2}|@",
    re.IGNORECASE,
)
_SPELT_DOT = r"[ \t]{0,2}[\[({<][ \t]?(?:dot|\.)[ \t]?[\])}>][ \t]{0,2}|[ \t]{1,2}dot[ \t]{1,2}"
_SPELT_LOCAL = re.compile(
    rf"[\w+\-]{{1,64}}(?:(?:\.|{_SPELT_DOT})[\w+\-]{{1,64}}){{0,3}}\Z", re.IGNORECASE
)
_SPELT_DOMAIN = re.compile(
    rf"[^\W_][\w\-]{{0,62}}(?:(?P<dot>\.|{_SPELT_DOT})[^\W_][\w\-]{{0,62}}){{0,3}}"
    rf"(?P<last>\.|{_SPELT_DOT})(?P<top>[a-z]{{2,12}})(?![\w])",
    re.IGNORECASE,
)
_SPELT_SIGNS = (" dot ", " DOT ", "(at)", "[at]", "(AT)", "[AT]", "{at}", "<at>")
_SPELT_BESIDE_AT = (" @ ", "(@)", "[@]", "[dot]", "(dot)")
_TOPS = """
com org net edu gov mil int info io co ai dev app me de uk fr it es nl be ch at pl cz se no fi dk
ie pt gr eu ru ua cn jp kr in br mx ar ca au nz za tr il
"""
_SPELT_TOPS = frozenset(_TOPS.split())


def find_email(text: str) -> Iterator[Finding]:
    """Addresses with a domain that has a top level, in any script."""
    for sign in (*_AT_SIGNS, *_AT_ENTITIES) if "&" in text else _AT_SIGNS:
        yield from _find_at(text, sign)
    signs = (*_SPELT_SIGNS, *_SPELT_BESIDE_AT) if "@" in text else _SPELT_SIGNS
    if any(sign in text for sign in signs):
        yield from _find_spelt(text)


def _find_at(text: str, sign: str) -> Iterator[Finding]:
    position = text.find(sign)
    while position >= 0:
        domain = _DOMAIN.match(text, position + len(sign))
        before = text[max(0, position - 64) : position] if domain else ""
        local = _LOCAL.search(before) or _QUOTED.search(before)
        if domain and local:
            name = local[0] if local[0].startswith('"') else local[0].lstrip(_LEADING)
            if (
                name
                and (".." not in name or name[0] == '"')
                and not _PASSWORD_OF_URL.search(before[: len(before) - len(name)])
                and _is_mailbox(name, domain[0], after=text[domain.end() :][:2])
            ):
                yield Finding(position - len(name), domain.end(), "EMAIL")
        position = text.find(sign, position + 1)


def _find_spelt(text: str) -> Iterator[Finding]:
    """Addresses whose signs are words; a plain "at" counts only where a "dot" is spelt, too."""
    for at in _SPELT_AT.finditer(text):
        domain = _SPELT_DOMAIN.match(text, at.end())
        if domain is None or domain["top"].lower() not in _SPELT_TOPS:
            continue
        bracketed = not at[0].strip().isalpha() and at[0] != "@"
        spelt = "dot" in domain[0].lower().split() or "[" in domain[0] or "(" in domain[0]
        left = max(0, at.start() - 80)
        local = _SPELT_LOCAL.search(text[left : at.start()])
        if local and (bracketed or spelt):
            yield Finding(left + local.start(), domain.end(), "EMAIL")


def _is_mailbox(name: str, domain: str, *, after: str) -> bool:
    """Not a repository's address, a picture for dense screens or a package's version."""
    if after[:1] == ":" and after[1:2].isalnum() and _SERVICE.search(name):
        return False
    if name.endswith((".", "/")) or after[:1] == "(":
        return False
    return domain.rpartition(".")[2].lower() not in _NOT_DOMAINS or domain.count(".") > 1


def find_ip(text: str) -> Iterator[Finding]:
    """IPv4 and IPv6 addresses that stand for a machine; versions and loopback are none."""
    for shape in _V4_SHAPE.finditer(text):
        match = _V4.match(text, shape.start())
        if match is None or match[0] == "127.0.0.1" or match[0].startswith("0."):
            continue
        before = text[max(0, match.start() - 24) : match.start()]
        if not _VERSION_BEFORE.search(before) and (
            _HOST_BEFORE.search(before) or not _is_version(text, match)
        ):
            yield Finding(match.start(), match.end(), "IP")
    for signs, pattern in _V4_WRITTEN_OTHERWISE:
        for match in pattern.finditer(text) if any(sign in text for sign in signs) else ():
            yield from _written_otherwise(match)
    yield from _find_v6(text)


def _written_otherwise(match: re.Match[str]) -> Iterator[Finding]:
    """Names of cloud machines (ip-10-0-3-7) and addresses made harmless (10[.]0[.]3[.]7)."""
    if match[0].replace(".", "").isdigit():
        return
    octets = re.findall(r"\d+", match[match.re.groups])
    if len(octets) == 4 and all(int(octet) < 256 for octet in octets):
        yield Finding(*match.span(match.re.groups), "IP")


def _is_version(text: str, match: re.Match[str]) -> bool:
    """Written as versions and sections are: 1.4.0.32, or 10.0.19.1-2+b1 as packages have it.

    Of all addresses one in 200 has so few digits; 1.1.1.1 and 8.8.8.8 are addresses.
    """
    after = text[match.end() : match.end() + 8]
    if _PORT_OR_PREFIX.match(after):
        return False
    if _REVISION.match(after):
        return not match[0].startswith(("10.", "192.168.", "172."))
    return match[0][1] == "." and len(match[0]) <= 9 and len(set(match[0])) > 2


def _find_v6(text: str) -> Iterator[Finding]:
    reached = 0
    for colon in _V6_COLON.finditer(text):
        start = colon.start()
        if start < reached:
            continue
        while start and start > colon.start() - 5 and text[start - 1] in _HEX:
            start -= 1
        if start and is_word(text[start - 1]):
            start = colon.start()
        labelled = start == colon.start() and (
            text[start + 1] != ":" or text[start + 2 : start + 3] == ":"
        )
        # As mail servers write it: [IPv6:2001:db8::1]
        match = _V6_LABELLED.match(text, start + 1) if labelled else _V6_RUN.match(text, start)
        if match is None:
            continue
        start, reached = match.span()
        address = match[0].rstrip(":") if not match[0].endswith("::") else match[0]
        if _is_v6(address) or _is_short_v6(text, start, address):
            yield Finding(start, start + len(address), "IP")


def _is_short_v6(text: str, start: int, address: str) -> bool:
    """``::d67`` is an address with a prefix length behind it or a word for machines before it."""
    end = start + len(address)
    return re.fullmatch("::[0-9A-Fa-f]{3,4}", address) is not None and (
        re.match(r"/\d{2,3}(?!\d)", text[end : end + 5]) is not None
        or _HOST_BEFORE.search(text[max(0, start - 24) : start]) is not None
    )


def _is_v6(address: str) -> bool:
    """A valid address that code (``std::a``), times and hardware addresses are not taken for."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    groups = [group for group in address.partition("%")[0].split(":") if group]
    if "." in address:
        return True
    if "::" not in address:
        return any(len(group) > 2 for group in groups)
    return any(character.isdigit() for character in address) and (
        (len(groups) >= 3 and max(map(len, groups)) > 1)
        or (len(groups) == 2 and len(groups[0]) >= 3)
    )
