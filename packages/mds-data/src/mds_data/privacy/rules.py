"""What to redact and how, as settings that travel to worker processes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mds_data.privacy.detection import AllowList
from mds_data.privacy.findings import KINDS, Kind
from mds_data.privacy.names import name_finder
from mds_data.privacy.replacement import Mode, Redactor

__all__ = ["RedactionRules"]


@dataclass(frozen=True, kw_only=True)
class RedactionRules:
    """What to replace and how. Can be sent to worker processes."""

    mode: Mode = "placeholder"
    kinds: tuple[Kind, ...] = KINDS
    key: bytes | None = field(default=None, repr=False)
    allow: tuple[str, ...] = field(default=(), repr=False)
    names: str | None = None
    """A spaCy model that is installed, or its folder, to find names of persons too."""

    def redactor(self) -> Redactor:
        """A redactor with these rules; DataError if they make no sense."""
        return Redactor(
            self.mode,
            kinds=self.kinds,
            key=self.key,
            allow=AllowList(self.allow),
            names=None if self.names is None else name_finder(self.names),
        )

    def described(self) -> Mapping[str, Any]:
        """The rules for a manifest: key and allowed values by fingerprints alone."""
        return {
            "mode": self.mode,
            "kinds": list(self.kinds),
            "names": None if self.names is None else Path(self.names).name,
            "key": _fingerprint(self.key) if self.mode == "pseudonym" and self.key else None,
            "allowed": len(self.allow),
            "allow_list": _digest(self.allow) if self.allow else None,
        }


def _fingerprint(key: bytes) -> str:
    """Tells two keys apart; whoever has it learns no more of the key than a pseudonym shows."""
    return hmac.new(key, b"mds-data redaction key", hashlib.sha256).hexdigest()[:16]


def _digest(values: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join(values).encode("utf-8", "surrogatepass")).hexdigest()
