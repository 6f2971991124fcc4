"""The bytes of a backup: objects by content and snapshots, plain or encrypted.

An object's name is the SHA-256 of its file; in an encrypted backup a keyed digest of it, so that
nobody can tell by its name that a file is there. What is read is always compared with the digest
that was asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

from mds_ckpt.encryption.envelope import CIPHER, FEATURE, VERSION
from mds_ckpt.encryption.keys import KeySource, recipients_of, unwrap, wrap
from mds_ckpt.encryption.segments import (
    HEADER_SIZE,
    SEGMENT_SIZE,
    FileKey,
    SealedFile,
    sealed_blocks,
    sealed_size,
)
from mds_ckpt.errors import RejectedError, SealedError, UnsupportedError, UsageError
from mds_ckpt.files import strict_json
from mds_ckpt.manifest import FileRecord
from mds_ckpt.protection.places import Place

__all__ = ["Vault", "create_vault", "open_vault"]

HEAD = "backup.json"
_FORMAT = "mds-backup"
_LIMIT = 256 << 20
_KEY_FILE = "key-1.age"


@dataclass(frozen=True, kw_only=True, slots=True)
class Vault:
    """A place with backups, opened."""

    place: Place
    folder: UUID
    data_key: bytes | None = field(default=None, repr=False)
    """None if the backups are plain."""

    # Objects

    def object_name(self, record: FileRecord) -> str:
        """Where the bytes of a file lie."""
        name = record.sha256
        if self.data_key is not None:
            secret = hashlib.sha256(b"mds-backup/1 names\0" + self.data_key).digest()
            name = hmac.digest(secret, bytes.fromhex(name), "sha256").hex()
        return f"objects/{name[:2]}/{name}"

    def has(self, record: FileRecord) -> bool:
        """Whether an object of the right size is there."""
        size = record.size if self.data_key is None else sealed_size(record.size, SEGMENT_SIZE)
        return self.place.size(self.object_name(record)) == size

    def put(self, record: FileRecord, read: Callable[[int], bytes | bytearray]) -> None:
        """Write an object.

        Args:
            record: Its size and digest; what is read is compared with them.
            read: Gives the next so many bytes.

        Raises:
            ValueError: What was read is something else; the object is not there then.
        """
        self.place.write(
            self.object_name(record),
            self._stored(self.object_name(record), _compared(read, record), record.size),
        )

    def get(self, record: FileRecord) -> Iterator[bytes]:
        """The bytes of an object; RejectedError at the end if they are not the right ones."""
        name = self.object_name(record)
        total, size = hashlib.sha256(), 0
        for block in self._opened(name):
            total.update(block)
            size += len(block)
            yield block
        if (size, total.hexdigest()) != (record.size, record.sha256):
            raise RejectedError(
                f"{self.place.name}/{name}",
                "its bytes don't have the digest that its name promises",
                remedy="remove it and back up again, or use another backup",
            )

    # Snapshots

    def write_snapshot(self, name: str, data: bytes) -> None:
        """Write a snapshot's file."""
        pieces = iter([data[at : at + SEGMENT_SIZE] for at in range(0, len(data), SEGMENT_SIZE)])
        self.place.write(name, self._stored(name, lambda _: next(pieces), len(data)))

    def read_snapshot(self, name: str) -> bytes:
        """The bytes of a snapshot's file."""
        if (self.place.size(name) or 0) > _LIMIT:
            raise RejectedError(f"{self.place.name}/{name}", "it is too large", remedy="remove it")
        return b"".join(self._opened(name))

    # Sealing

    def _stored(
        self, name: str, read: Callable[[int], bytes | bytearray], size: int
    ) -> Iterator[bytes | bytearray]:
        if self.data_key is None:
            yield from (read(min(SEGMENT_SIZE, size - at)) for at in range(0, size, SEGMENT_SIZE))
            return
        key = self._file_key(name, secrets.token_bytes(16))
        yield from sealed_blocks(read, size=size, cut=SEGMENT_SIZE, key=key)

    def _opened(self, name: str) -> Iterator[bytes]:
        if self.data_key is None:
            yield from self.place.blocks(name)
            return
        stream = _Stream(self.place.blocks(name))
        header = stream.read_at(0, HEADER_SIZE)
        key = self._file_key(name, header[32:48])
        where = f"{self.place.name}/{name}"
        stored = self.place.size(name) or 0
        file = SealedFile(stream.read_at, stored, key=key, name=where, keep=False)
        for number in range(file.count):
            yield file.segment(number)

    def _file_key(self, name: str, file_id: bytes) -> FileKey:
        assert self.data_key is not None
        return FileKey(data_key=self.data_key, folder=self.folder.bytes, path=name, file_id=file_id)


def _compared(
    read: Callable[[int], bytes | bytearray], record: FileRecord
) -> Callable[[int], bytes | bytearray]:
    """The reader, which refuses to give its last bytes if all of them are not the right ones."""
    total, done = hashlib.sha256(), 0

    def compared(count: int) -> bytes | bytearray:
        nonlocal done
        data = read(count)
        total.update(data)
        done += len(data)
        if done == record.size and total.hexdigest() != record.sha256:
            raise ValueError(
                f"the bytes have the digest {total.hexdigest()[:12]}... where the manifest says "
                f"{record.sha256[:12]}...; the original is damaged"
            )
        return data

    return compared


class _Stream:
    """Blocks, read at rising offsets; the first bytes may be read twice."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._data = bytearray()
        self._start = 0

    def read_at(self, start: int, count: int) -> bytes:
        while len(self._data) < start + count - self._start:
            block = next(self._blocks, None)
            if block is None:
                break
            self._data += block
        found = bytes(self._data[start - self._start : start - self._start + count])
        if start >= HEADER_SIZE:
            del self._data[: start + count - self._start]
            self._start = start + count
        return found


def open_vault(place: Place, key: KeySource | None) -> Vault | None:
    """The backups at a place; None if there are none.

    Raises:
        RejectedError: It is something else, or the key does not open it.
    """
    if place.size(HEAD) is None:
        return None
    where = f"{place.name}/{HEAD}"
    try:
        members = strict_json.parse(place.read(HEAD, limit=_LIMIT))
        if not isinstance(members, dict) or members.get("format") != _FORMAT:
            raise ValueError("it is that of no backup")
        _check_version(members, where=where)
        folder = UUID(str(members.get("uuid")))
        keys = _keys(members)
    except ValueError as error:
        if isinstance(error, RejectedError):
            raise
        raise RejectedError(where, str(error), remedy="name another place") from None
    if keys is None:
        if key is not None:
            raise UsageError(f"{place.name} is not encrypted, and a key was given; leave it away")
        return Vault(place=place, folder=folder)
    if key is None:
        reason = "the backups are encrypted, and no key was given"
        raise SealedError(where, reason, remedy="give it (--identity ...)")
    data_key = unwrap(
        keys,
        folder=str(folder),
        source=key,
        read_file=lambda name: place.read(name, limit=_LIMIT),
        name=place.name,
    )
    return Vault(place=place, folder=folder, data_key=data_key)


def _check_version(members: Mapping[str, Any], *, where: str) -> None:
    version, requires = str(members.get("format_version")), members.get("requires")
    encryption = members.get("encryption") or {}
    if not isinstance(encryption, dict):
        raise ValueError("member 'encryption' is no object")  # noqa: TRY004
    known = requires in ([], [FEATURE])
    if encryption:
        cipher, major = encryption.get("cipher"), str(encryption.get("version")).partition(".")[0]
        known = known and cipher == CIPHER and major == VERSION.partition(".")[0]
    if version.partition(".")[0] != "1" or not known:
        raise UnsupportedError(
            where,
            f"it has version {version[:20]} and requires {str(requires)[:60]}",
            remedy="use a newer mds-ckpt",
        )


def _keys(members: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    encryption = members.get("encryption")
    if encryption is None:
        return None
    keys = encryption.get("keys") if isinstance(encryption, dict) else None
    if not isinstance(keys, list) or not keys:
        raise ValueError("its keys are missing")
    for record in keys:
        kind = record.get("kind") if isinstance(record, dict) else None
        if kind not in ("age", "scrypt", "command"):
            raise ValueError("a key is of no known kind")
        if record["kind"] == "age" and record.get("file") != _KEY_FILE:
            raise ValueError("the file of a key has no allowed name")
    return keys


def create_vault(
    place: Place, *, recipients: Sequence[str] = (), key: KeySource | None = None
) -> Vault:
    """Begin backups at an empty place; encrypted if anybody is named who may open them."""
    recipients = [*recipients, *(recipients_of(key) if key is not None else ())]
    folder = uuid4()
    members: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": "1.0",
        "requires": [],
        "uuid": str(folder),
    }
    data_key = None
    if recipients or key is not None:
        data_key = secrets.token_bytes(32)
        records = []
        for each in wrap(data_key, folder=str(folder), recipients=recipients, source=key):
            record = dict(each.record)
            if each.content is not None:
                record["file"] = _KEY_FILE
                place.write(_KEY_FILE, [each.content])
            records.append(record)
        members["requires"] = [FEATURE]
        members["encryption"] = {"version": VERSION, "cipher": CIPHER, "keys": records}
    place.write(HEAD, [(json.dumps(members, indent=1) + "\n").encode()])
    return Vault(place=place, folder=folder, data_key=data_key)
