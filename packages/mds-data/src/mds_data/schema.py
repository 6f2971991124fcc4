"""What a store's manifest says: frozen records, and a strict reader and writer of manifest.json.

The law is docs/formats/store.md. Nothing here touches a file.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn

import numpy as np

from mds_data.errors import ManifestError

__all__ = [
    "FORMAT_VERSION",
    "MANIFEST_LIMIT",
    "MANIFEST_NAME",
    "Counts",
    "Erasure",
    "FileRecord",
    "Layout",
    "Manifest",
    "Producer",
    "Segment",
    "TokenizerRecord",
    "check_relative_path",
    "manifest_from_json",
    "manifest_to_json",
    "package_version",
    "parse_json",
    "token_dtype",
]

Layout = Literal["hot", "archive"]

FORMAT_NAME = "mds-store"
FORMAT_VERSION = "1.0"
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 256 * 2**20
"""Largest manifest that a reader accepts, in bytes."""
KNOWN_FEATURES = frozenset({"segments/1"})
_NO_DIGEST = "0" * 64
"""Stands for the manifest's own digest while that is computed."""
_LARGEST = 2**62
_HEX64 = re.compile(r"[0-9a-f]{64}")
_PART = r'(?!\.{1,2}(?:/|$))[^\x00-\x1f\x7f\\:*?"<>|/]+'
_SAFE_PATH = re.compile(f"{_PART}(?:/{_PART})*")
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")


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


def manifest_to_json(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: UTF-8, keys in a fixed order, unset optional members left out."""
    members: dict[str, Any] = {"format": FORMAT_NAME, "format_version": manifest.format_version}
    members |= asdict(manifest)
    if manifest.created is None:
        del members["created"]
    if manifest.counts.sentences is None:
        del members["counts"]["sentences"]
    if manifest.tokenizer is not None and manifest.tokenizer.name is None:
        del members["tokenizer"]["name"]
    members["files"] = dict(sorted(members["files"].items()))
    members["digest"] = _NO_DIGEST
    text = json.dumps(members, ensure_ascii=False, indent=1, allow_nan=False) + "\n"
    data = text.encode()
    return data.replace(_NO_DIGEST.encode(), hashlib.sha256(data).hexdigest().encode())


def parse_json(data: bytes, *, name: str) -> dict[str, Any]:
    """Read one JSON object strictly: UTF-8, no duplicate keys, no NaN, bounded depth.

    Raises:
        ManifestError: with ``name`` and the reason.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"it holds {constant}, which JSON does not know")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"the key {twice[:100]!r} stands twice")
        return members

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ManifestError(f"{name}: is nested too deeply to be a store's metadata") from None
    except ValueError as error:
        raise ManifestError(f"{name}: is not valid JSON metadata: {error}") from None
    if not isinstance(value, dict):
        raise ManifestError(f"{name}: must hold one JSON object, not {type(value).__name__}")
    return value


def check_relative_path(path: str, *, name: str) -> str:
    """Return ``path`` if it stays inside the store's folder on every system, else raise."""
    if _SAFE_PATH.fullmatch(path) and len(path) <= 1024:
        return path
    if any(part in {"", ".", ".."} for part in path.split("/")):
        raise ManifestError(f"{name}: the path {path[:100]!r} leaves the store's folder")
    raise ManifestError(f"{name}: the path {path[:100]!r} holds characters that no store uses")


class _Members:
    """Typed access to one JSON object; every complaint names the file and the member."""

    def __init__(self, value: object, *, name: str, where: str = "") -> None:
        self._name = name
        self._where = where
        if not isinstance(value, dict):
            self.fail("", f"must be an object, not {type(value).__name__}")
        self._value: dict[str, Any] = value

    def fail(self, member: str, reason: str) -> NoReturn:
        place = ".".join(part for part in (self._where, member) if part) or "the top level"
        raise ManifestError(f"{self._name}: {place} {reason}")

    def has(self, member: str) -> bool:
        return self._value.get(member) is not None

    def raw(self, member: str) -> Any:
        if member not in self._value:
            self.fail(member, "is missing")
        return self._value[member]

    def text(self, member: str, *, limit: int = 4096) -> str:
        value = self.raw(member)
        if not isinstance(value, str) or len(value) > limit:
            self.fail(member, f"must be a string of at most {limit} characters")
        return value

    def digest(self, member: str) -> str:
        value = self.text(member)
        if not _HEX64.fullmatch(value):
            self.fail(member, "must be a SHA-256 in 64 lower-case hex digits")
        return value

    def integer(self, member: str, *, low: int = 0, high: int = _LARGEST) -> int:
        value = self.raw(member)
        if type(value) is not int or not low <= value <= high:
            self.fail(member, f"must be a whole number from {low} to {high}")
        return value

    def optional_integer(self, member: str) -> int | None:
        return self.integer(member) if self.has(member) else None

    def optional_text(self, member: str) -> str | None:
        return self.text(member) if self.has(member) else None

    def choice(self, member: str, options: Sequence[str]) -> str:
        value = self.raw(member)
        if value not in options:
            self.fail(member, f"must be one of {', '.join(options)}, not {str(value)[:60]!r}")
        return str(value)

    def child(self, member: str) -> "_Members":
        return _Members(self.raw(member), name=self._name, where=self._place(member))

    def children(self, member: str) -> list["_Members"]:
        values = self._value.get(member, [])
        if not isinstance(values, list):
            self.fail(member, "must be a list")
        place = self._place(member)
        return [
            _Members(value, name=self._name, where=f"{place}[{index}]")
            for index, value in enumerate(values)
        ]

    def path(self, member: str) -> str:
        return check_relative_path(self.text(member), name=self._name)

    def _place(self, member: str) -> str:
        return f"{self._where}.{member}" if self._where else member


def manifest_from_json(data: bytes, *, name: str = MANIFEST_NAME) -> Manifest:
    """Read and check manifest.json.

    Args:
        data: The bytes of the file.
        name: How messages call the file.

    Raises:
        ManifestError: The bytes break the format, or need a reader that this one is not.
    """
    if len(data) > MANIFEST_LIMIT:
        raise ManifestError(f"{name}: has {len(data)} bytes; a manifest holds at most 256 MiB")
    members = _Members(parse_json(data, name=name), name=name)
    _check_readable(members, name=name)
    _check_digest(members, data)
    vocab_size = members.integer("vocab_size", low=1, high=2**31 - 1)
    eod_id = members.optional_integer("eod_id")
    if eod_id is not None and eod_id >= vocab_size:
        members.fail("eod_id", f"({eod_id}) must be smaller than vocab_size ({vocab_size})")
    dtype: Literal["uint16", "int32"] = (
        "uint16" if members.choice("dtype", ["uint16", "int32"]) == "uint16" else "int32"
    )
    if dtype == "uint16" and vocab_size > 2**16:
        members.fail("dtype", f"uint16 can't hold a vocabulary of {vocab_size}")
    return Manifest(
        format_version=members.text("format_version"),
        requires=tuple(members.raw("requires")),
        uuid=members.text("uuid", limit=100),
        revision=members.integer("revision", low=1),
        created=members.optional_text("created"),
        producer=_producer(members.child("producer")),
        vocab_size=vocab_size,
        eod_id=eod_id,
        dtype=dtype,
        layout="hot" if members.choice("layout", ["hot", "archive"]) == "hot" else "archive",
        counts=_counts(members.child("counts")),
        tokenizer=_tokenizer(members.child("tokenizer")) if members.has("tokenizer") else None,
        split=_split(members) if members.has("split") else None,
        files=_files(members, name=name),
        segments=tuple(_segment(item) for item in members.children("segments")),
        erasures=tuple(_erasure(item) for item in members.children("erasures")),
        encryption=None,
        provenance=members.raw("provenance") if members.has("provenance") else {},
    )


def _check_readable(members: _Members, *, name: str) -> None:
    if members.raw("format") != FORMAT_NAME:
        members.fail("format", f"must be {FORMAT_NAME!r}; this folder is something else")
    written = members.text("format_version", limit=40)
    matched = _VERSION.fullmatch(written)
    if not matched:
        members.fail("format_version", f"must be MAJOR.MINOR, not {written!r}")
    if matched[1] != FORMAT_VERSION.split(".")[0]:
        raise ManifestError(
            f"{name}: the store has format version {written}, and mds-data {package_version()} "
            f"reads version {FORMAT_VERSION.split('.')[0]}.x; "
            f"install an mds-data that reads version {matched[1]}.x"
        )
    requires = members.raw("requires")
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        members.fail("requires", "must be a list of strings")
    unknown = sorted(set(requires) - KNOWN_FEATURES)
    if unknown or members.has("encryption"):
        names = ", ".join(repr(item[:60]) for item in unknown) or "'encryption/1'"
        known = ", ".join(sorted(KNOWN_FEATURES))
        raise ManifestError(
            f"{name}: the store requires {names}, which mds-data {package_version()} does not know "
            f"(it knows {known}); install a newer mds-data"
        )


def has_digest(data: bytes) -> bool:
    """Whether the bytes of a manifest carry its own digest."""
    return b'"digest": "' in data


def _check_digest(members: _Members, data: bytes) -> None:
    """Compare the manifest's own digest: SHA-256 of its bytes with the digest's digits as 0."""
    if not members.has("digest"):
        return
    stated = members.digest("digest").encode()
    blank = data.replace(stated, _NO_DIGEST.encode())
    if hashlib.sha256(blank).hexdigest().encode() != stated:
        members.fail("digest", "differs from the file's content; restore the manifest from a copy")


def _producer(members: _Members) -> Producer:
    return Producer(name=members.text("name"), version=members.text("version"))


def _counts(members: _Members) -> Counts:
    return Counts(
        documents=members.integer("documents"),
        tokens=members.integer("tokens"),
        sentences=members.optional_integer("sentences"),
    )


def _tokenizer(members: _Members) -> TokenizerRecord:
    return TokenizerRecord(
        kind=members.text("kind"),
        file=members.path("file"),
        sha256=members.digest("sha256"),
        name=members.optional_text("name"),
    )


def _split(members: _Members) -> dict[str, tuple[float, float]]:
    value = members.raw("split")
    if not isinstance(value, dict):
        members.fail("split", "must be an object")
    ranges: dict[str, tuple[float, float]] = {}
    for key, bounds in value.items():
        if not _is_fraction_range(bounds):
            members.fail(
                f"split[{key[:80]!r}]", "must be [start, stop] with 0 <= start <= stop <= 1"
            )
        ranges[key] = (float(bounds[0]), float(bounds[1]))
    return ranges


def _is_fraction_range(bounds: object) -> bool:
    if not isinstance(bounds, list) or len(bounds) != 2:
        return False
    if not all(type(bound) in {int, float} and math.isfinite(bound) for bound in bounds):
        return False
    return bool(0 <= bounds[0] <= bounds[1] <= 1)


def _files(members: _Members, *, name: str) -> dict[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    records = members.raw("files")
    if not isinstance(records, dict):
        members.fail("files", "must be an object")
    for path, record in records.items():
        check_relative_path(path, name=name)
        if path == MANIFEST_NAME:
            members.fail("files", "names the manifest itself")
        item = _Members(record, name=name, where=f"files[{path[:80]!r}]")
        files[path] = FileRecord(size=item.integer("size"), sha256=item.digest("sha256"))
    return files


def _segment(members: _Members) -> Segment:
    return Segment(
        path=members.path("path"),
        uuid=members.text("uuid", limit=100),
        revision=members.integer("revision", low=1),
        manifest_sha256=members.digest("manifest_sha256"),
        documents=members.integer("documents"),
        tokens=members.integer("tokens"),
    )


def _erasure(members: _Members) -> Erasure:
    documents = members.raw("documents")
    if not isinstance(documents, list) or any(type(item) is not int for item in documents):
        members.fail("documents", "must be a list of document numbers")
    return Erasure(
        documents=tuple(documents),
        when=members.text("when"),
        reason=members.text("reason"),
        tokens=members.integer("tokens"),
        revision=members.optional_integer("revision"),
    )
