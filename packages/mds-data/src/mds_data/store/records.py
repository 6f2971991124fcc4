"""What a store's manifest says, as frozen records. No JSON, no files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np

__all__ = [
    "FORMAT_VERSION",
    "Counts",
    "Erasure",
    "FileRecord",
    "Layout",
    "Manifest",
    "Producer",
    "Segment",
    "TokenizerRecord",
    "package_version",
    "token_dtype",
]

Layout = Literal["hot", "archive"]

FORMAT_VERSION = "1.0"


def package_version() -> str:
    """Version of the installed mds-data, or "unknown" when it runs from a bare folder."""
    try:
        return version("mds-data")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """How much the store holds; ``tokens`` counts document tokens, not gaps."""

    documents: int
    tokens: int
    sentences: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Producer:
    """The program that wrote the store."""

    name: str = "mds-data"
    version: str = field(default_factory=package_version)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRecord:
    """The tokenizer that made the ids; ``file`` is a path inside the store."""

    kind: str
    file: str
    sha256: str
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """One store inside a merged store's folder."""

    path: str
    uuid: str
    revision: int
    manifest_sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Erasure:
    """A record that documents were removed; never their content."""

    documents: tuple[int, ...]
    when: str
    reason: str
    tokens: int
    revision: int | None = None
    """First revision of the store without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything that manifest.json says."""

    uuid: str
    vocab_size: int
    eod_id: int | None
    dtype: Literal["uint16", "int32"]
    layout: Layout
    counts: Counts
    files: Mapping[str, FileRecord]
    format_version: str = FORMAT_VERSION
    requires: tuple[str, ...] = ()
    revision: int = 1
    created: str | None = None
    producer: Producer = field(default_factory=Producer)
    tokenizer: TokenizerRecord | None = None
    split: Mapping[str, tuple[float, float]] | None = None
    segments: tuple[Segment, ...] = ()
    erasures: tuple[Erasure, ...] = ()
    encryption: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Little-endian dtype that holds every id below ``vocab_size``."""
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<i4")
