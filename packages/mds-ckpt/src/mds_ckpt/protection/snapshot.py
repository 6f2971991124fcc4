"""What a backup keeps of one folder: its files by size and digest, and where their bytes lie."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.files import strict_json
from mds_ckpt.files.regular_file import name_fault, read_whole
from mds_ckpt.manifest import MANIFEST_NAME, SIZE_LIMIT, FileRecord

__all__ = ["FORMATS", "Snapshot", "files_of", "new_file_name", "snapshot_name"]

FORMATS = ("mds-checkpoint", "mds-store")
_SNAPSHOT = "mds-snapshot"
_FILE = re.compile(r"snapshots/([^/~]{1,200})~([0-9]{8}T[0-9]{12}Z)-[0-9a-f]{8}\.json")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_DEEPEST = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One folder at one time."""

    name: str
    """The folder's."""
    format: str
    """``mds-checkpoint`` or ``mds-store``."""
    created: str
    files: Mapping[str, FileRecord]
    """Every file, the manifest too, by its path in the folder."""

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which names the digests of all other files."""
        return self.files[MANIFEST_NAME].sha256

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def to_json(self) -> bytes:
        """The bytes of a snapshot's file."""
        members = {
            "format": _SNAPSHOT,
            "format_version": "1.0",
            "name": self.name,
            "of": self.format,
            "created": self.created,
            "files": {
                path: {"size": record.size, "sha256": record.sha256}
                for path, record in sorted(self.files.items())
            },
        }
        return (json.dumps(members, ensure_ascii=False, indent=1) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, *, path: str) -> Snapshot:
        """A snapshot; RejectedError if the bytes are none."""
        try:
            members = _object(strict_json.parse(data))
            if members.get("format") != _SNAPSHOT or members.get("of") not in FORMATS:
                raise ValueError("it is no snapshot of a checkpoint or store")
            if str(members.get("format_version")).partition(".")[0] != "1":
                raise ValueError("it has another major version than 1")
            files = {
                _checked_path(each): _record(record)
                for each, record in _object(members.get("files")).items()
            }
            name = members.get("name")
            if MANIFEST_NAME not in files or not isinstance(name, str) or name_fault(name):
                raise ValueError("it lacks its manifest or name")
        except ValueError as error:
            raise RejectedError(
                path, f"this is not a valid snapshot, {error}", remedy="use an older snapshot"
            ) from None
        created = str(members.get("created"))
        return cls(name=name, format=members["of"], created=created, files=files)


def new_file_name(name: str) -> str:
    """A fresh name for a snapshot's file; later ones sort behind."""
    return f"snapshots/{name}~{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}-{token_hex(4)}.json"


def snapshot_name(path: str) -> tuple[str, str] | None:
    """The folder's name and the time that a snapshot's file name tells; None for another file."""
    found = _FILE.fullmatch(path)
    return None if found is None else (found[1], found[2])


def files_of(
    folder: Path, *, prefix: str = "", depth: int = 0
) -> tuple[str, dict[str, FileRecord]]:
    """The format of a folder, and every file that its manifest names, itself included.

    A store's segments are stores inside it. Encrypted folders are taken as they are.
    """
    path = folder / prefix / MANIFEST_NAME
    data = read_whole(path, limit=SIZE_LIMIT)
    try:
        members = _object(strict_json.parse(data))
        if members.get("format") not in FORMATS or depth > _DEEPEST:
            raise ValueError("it is that of no mds checkpoint or store")
        files = {
            _checked_path(f"{prefix}{name}"): _record(record)
            for name, record in _object(members.get("files")).items()
        }
        inner = [_checked_path(f"{prefix}{each}") for each in _segments(members)]
    except ValueError as error:
        raise RejectedError(
            path, f"{error}", remedy="name the folder of one checkpoint or store"
        ) from None
    files[f"{prefix}{MANIFEST_NAME}"] = _record_of(data)
    for segment in inner:
        files |= files_of(folder, prefix=f"{segment}/", depth=depth + 1)[1]
    return str(members["format"]), files


def _segments(members: Mapping[str, Any]) -> Iterator[str]:
    segments = members.get("segments") or []
    if not isinstance(segments, list):
        raise ValueError("member 'segments' is no list")  # noqa: TRY004
    for segment in segments:
        yield str(_object(segment).get("path"))


def _record_of(data: bytes) -> FileRecord:
    return FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _object(value: object) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError("a member is no object")


def _record(value: object) -> FileRecord:
    members = _object(value)
    size, sha256 = members.get("size"), members.get("sha256")
    if type(size) is not int or not 0 <= size < 2**63 or not _HEX64.fullmatch(str(sha256)):
        raise ValueError("a file has no size or digest")
    return FileRecord(size=size, sha256=str(sha256))


def _checked_path(path: str) -> str:
    """A path inside the folder; ValueError for one that leaves it."""
    for part in path.split("/"):
        if (fault := name_fault(part)) is not None:
            raise ValueError(f"the file name {path[:80]!r} {fault}")
    return path
