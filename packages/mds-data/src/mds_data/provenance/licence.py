"""SPDX licence expressions, and policies that say which of them may be trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from mds_data.errors import DataError
from mds_data.provenance.small_toml import read_small_toml

__all__ = ["PRESETS", "LicencePolicy", "check_expression", "read_policy"]

_TOKEN = re.compile(r"\(|\)|[^\s()]+")


def check_expression(text: str) -> str:
    """Return an SPDX licence expression in its usual spelling.

    Raises:
        ValueError: It names a licence that SPDX does not list.
    """
    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression as error:
        raise ValueError(
            f"{text[:80]!r} is no SPDX licence expression ({error}); write an id such as "
            f"CC-BY-4.0 or MIT (spdx.org/licenses), or LicenseRef-NAME for terms of their own"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class LicencePolicy:
    """Which licences the sources of a dataset may have."""

    name: str
    allow: tuple[str, ...] = ("*",)
    """Patterns of SPDX ids, such as ``CC-BY-[0-9]*``."""
    deny: tuple[str, ...] = ()
    """Patterns that win over ``allow``."""
    unknown: bool = False
    """Accept sources of which no licence is known."""

    def fault(self, licence: str | None) -> str | None:
        """Return why a source with this licence is refused, or None."""
        if licence is None:
            return None if self.unknown else "no licence is recorded"
        try:
            expression = check_expression(licence)
        except ValueError:
            return "is no SPDX licence expression"
        if _holds(expression, self._takes):
            return None
        return f"not allowed by the policy {self.name}"

    def _takes(self, licence: str) -> bool:
        plain = licence.rstrip("+").upper()
        if any(fnmatchcase(plain, pattern.upper()) for pattern in self.deny):
            return False
        return any(fnmatchcase(plain, pattern.upper()) for pattern in self.allow)


_RESTRICTED = ("*-NC", "*-NC-*", "*-ND", "*-ND-*", "*NONCOMMERCIAL*", "*NONPRODUCTION*")
PRESETS = {
    policy.name: policy
    for policy in (
        LicencePolicy(name="known"),
        LicencePolicy(name="open", deny=(*_RESTRICTED, "LICENSEREF-*")),
        LicencePolicy(
            name="permissive",
            allow=(
                *("CC0-*", "CC-PDDC", "CC-PDM-*", "PDDL-*", "CC-BY-[0-9]*", "ODC-BY-*"),
                *("CDLA-PERMISSIVE-*", "0BSD", "APACHE-2.0", "BSD-*", "BSL-1.0", "ISC", "MIT"),
                *("MIT-*", "PSF-*", "PYTHON-*", "UNLICENSE", "ZLIB"),
            ),
        ),
    )
}
"""``known``: some licence is recorded. ``open``: and it forbids neither commerce nor changes.
``permissive``: and it asks for no more than attribution."""


def read_policy(text: str) -> LicencePolicy:
    """Return a preset by its name, or the policy in a TOML file.

    Raises:
        DataError: There is neither, or the file holds something else.
    """
    if text in PRESETS:
        return PRESETS[text]
    path = Path(text)
    if not path.is_file():
        raise DataError(
            f"{text}: is neither a policy of ours ({', '.join(PRESETS)}) nor a file; a file holds "
            f'lines such as allow = ["CC-BY-*", "MIT"]'
        )
    members = read_small_toml(path)
    odd = sorted(set(members) - {"allow", "deny", "unknown"})
    if odd:
        raise DataError(f"{path}: a policy has allow, deny and unknown, not {odd[0]!r}")
    for key in ("allow", "deny"):
        value = members.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise DataError(f"{path}: {key} must be a list of patterns of SPDX ids")
    if members.get("unknown", "fail") not in {"fail", "accept"}:
        raise DataError(f'{path}: unknown must be "fail" or "accept"')
    return LicencePolicy(
        name=path.name,
        allow=tuple(members.get("allow", ["*"])),
        deny=tuple(members.get("deny", ())),
        unknown=members.get("unknown") == "accept",
    )


def _holds(expression: str, takes: Callable[[str], bool]) -> bool:
    """Whether one may choose so among ORs that every licence to be kept is taken."""
    tokens = iter(_TOKEN.findall(expression))
    return _alternatives(_Ahead(tokens), takes)


class _Ahead:
    """Tokens of a checked expression, with a look at the next one."""

    def __init__(self, tokens: Iterator[str]) -> None:
        self._tokens = tokens
        self.next = next(tokens, "")

    def take(self) -> str:
        token, self.next = self.next, next(self._tokens, "")
        return token


def _alternatives(tokens: _Ahead, takes: Callable[[str], bool]) -> bool:
    result = _conjunction(tokens, takes)
    while tokens.next == "OR":
        tokens.take()
        result = _conjunction(tokens, takes) or result
    return result


def _conjunction(tokens: _Ahead, takes: Callable[[str], bool]) -> bool:
    result = _single(tokens, takes)
    while tokens.next == "AND":
        tokens.take()
        result = _single(tokens, takes) and result
    return result


def _single(tokens: _Ahead, takes: Callable[[str], bool]) -> bool:
    token = tokens.take()
    if token == "(":
        result = _alternatives(tokens, takes)
        tokens.take()
        return result
    if tokens.next == "WITH":  # An exception only adds to what a licence allows.
        tokens.take()
        tokens.take()
    return takes(token)
