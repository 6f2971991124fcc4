"""Read and write manifest.json strictly.

The law is docs/formats/store.md. Nothing here touches a file.
"""

import hashlib
import json
import math
import re
from dataclasses import asdict
from typing import Any, Literal

from mds_data.errors import ManifestError, SealedError
from mds_data.store.records import (
    FORMAT_VERSION,
    Counts,
    Erasure,
    FileRecord,
    Layout,
    Manifest,
    Producer,
    Segment,
    TokenizerRecord,
    package_version,
    token_dtype,
)
from mds_data.store.strict_json import (
    Members,
    check_relative_path,
    parse_json,
    quick_file_record,
)

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
    "has_digest",
    "manifest_from_json",
    "manifest_to_json",
    "package_version",
    "parse_json",
    "token_dtype",
]

FORMAT_NAME = "mds-store"
MANIFEST_NAME = "manifest.json"
MANIFEST_LIMIT = 256 * 2**20
"""Largest manifest that a reader accepts, in bytes."""
KNOWN_FEATURES = frozenset({"segments/1"})
_NO_DIGEST = "0" * 64
"""Stands for the manifest's own digest while that is computed."""
_VERSION = re.compile(r"([0-9]{1,6})\.([0-9]{1,6})")


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
    members = Members(parse_json(data, name=name), name=name)
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


def _check_readable(members: Members, *, name: str) -> None:
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
    if "encryption/1" in requires:
        raise SealedError(
            name,
            "the store is encrypted, and no key was given",
            remedy="give it (--identity, --passphrase-file, --key-command; key= in Python) where "
            "the command takes one, or write a plain copy with mds-data decrypt",
        )
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


def _check_digest(members: Members, data: bytes) -> None:
    """Compare the manifest's own digest: SHA-256 of its bytes with the digest's digits as 0."""
    if not members.has("digest"):
        return
    stated = members.digest("digest").encode()
    blank = data.replace(stated, _NO_DIGEST.encode())
    if hashlib.sha256(blank).hexdigest().encode() != stated:
        members.fail("digest", "differs from the file's content; restore the manifest from a copy")


def _producer(members: Members) -> Producer:
    return Producer(name=members.text("name"), version=members.text("version"))


def _counts(members: Members) -> Counts:
    return Counts(
        documents=members.integer("documents"),
        tokens=members.integer("tokens"),
        sentences=members.optional_integer("sentences"),
    )


def _tokenizer(members: Members) -> TokenizerRecord:
    return TokenizerRecord(
        kind=members.text("kind"),
        file=members.path("file"),
        sha256=members.digest("sha256"),
        name=members.optional_text("name"),
    )


def _split(members: Members) -> dict[str, tuple[float, float]]:
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


def _files(members: Members, *, name: str) -> dict[str, FileRecord]:
    files: dict[str, FileRecord] = {}
    records = members.raw("files")
    if not isinstance(records, dict):
        members.fail("files", "must be an object")
    for path, record in records.items():
        quick = quick_file_record(path, record)
        if quick is not None and path != MANIFEST_NAME:
            files[path] = FileRecord(size=quick[0], sha256=quick[1])
            continue
        check_relative_path(path, name=name)  # here on to name what is wrong
        if path == MANIFEST_NAME:
            members.fail("files", "names the manifest itself")
        item = Members(record, name=name, where=f"files[{path[:80]!r}]")
        files[path] = FileRecord(size=item.integer("size"), sha256=item.digest("sha256"))
    return files


def _segment(members: Members) -> Segment:
    return Segment(
        path=members.path("path"),
        uuid=members.text("uuid", limit=100),
        revision=members.integer("revision", low=1),
        manifest_sha256=members.digest("manifest_sha256"),
        documents=members.integer("documents"),
        tokens=members.integer("tokens"),
    )


def _erasure(members: Members) -> Erasure:
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
