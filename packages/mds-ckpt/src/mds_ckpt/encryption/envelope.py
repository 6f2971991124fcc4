"""What an encrypted folder says openly, and the sealed manifest that says the rest. No files.

``manifest.json`` keeps its name and becomes the envelope: which format lies inside, the wrapped
data keys, and size and digest of every sealed file. Names, shapes and sources are in
``manifest.sealed`` only.
"""

import base64
import hashlib
import json
import re
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

# The same file lies in two packages.
from ..errors import SealedError  # noqa: TID252
from .keys import KeySource, unwrap, wrap
from .segments import SEGMENT_SIZE, Buffer, Cut, FileKey, SealedFile, sealed_blocks

__all__ = [
    "ENVELOPE_LIMIT",
    "FEATURE",
    "Contents",
    "Envelope",
    "Sealing",
    "envelope_from_json",
    "envelope_to_json",
    "is_envelope",
    "rewrapped",
    "unlock",
]

FEATURE = "encryption/1"
VERSION = "1.0"
CIPHER = "AES-256-GCM"
SEALED_MANIFEST = "manifest.sealed"
INNER_MANIFEST = "manifest.json"
ENVELOPE_LIMIT = 64 * 2**20
_MANIFEST_LIMIT = 512 * 2**20
_MOST_OBJECTS = 2_000_000
_NO_DIGEST = "0" * 64
_REQUIRES = re.compile(rb'"requires"\s*:\s*\[[^]]*"encryption/[0-9]+"')
_FILE = re.compile(r"([0-9]{6,12}|manifest)\.sealed|key-[0-9]{1,9}\.age")
_HEX64, _HEX32 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
_MOST_KEYS = 100
_KINDS = frozenset({"age", "scrypt", "command"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """The open part of an encrypted folder."""

    format: str
    format_version: str
    folder: str
    """The folder's identity (a UUID), made when it was encrypted."""
    keys: Sequence[Mapping[str, Any]]
    """The data key, wrapped once for each way to open it."""
    manifest_id: str
    """File id of the sealed manifest, 32 hex digits."""
    files: Mapping[str, tuple[int, str]]
    """Size and SHA-256 of every file beside the envelope."""
    generation: int = 1
    """One more at each rotation of the wrapped keys."""


def is_envelope(data: bytes) -> bool:
    """Whether the bytes of a manifest are those of an envelope, or claim to be."""
    return _REQUIRES.search(data[:4096]) is not None


def envelope_to_json(envelope: Envelope) -> bytes:
    """The bytes of ``manifest.json``, with a digest of themselves as last member."""
    members = {
        "format": envelope.format,
        "format_version": envelope.format_version,
        "requires": [FEATURE],
        "uuid": envelope.folder,
        "encryption": {
            "version": VERSION,
            "cipher": CIPHER,
            "generation": envelope.generation,
            "keys": [dict(record) for record in envelope.keys],
            "manifest": {"file": SEALED_MANIFEST, "id": envelope.manifest_id},
        },
        "files": {
            name: {"size": size, "sha256": digest}
            for name, (size, digest) in sorted(envelope.files.items())
        },
        "digest": _NO_DIGEST,
    }
    data = (json.dumps(members, ensure_ascii=True, indent=1, allow_nan=False) + "\n").encode()
    at = data.rindex(_NO_DIGEST.encode())
    return data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + 64 :]


def envelope_from_json(data: bytes, *, name: str) -> Envelope:
    """Read and check an envelope.

    Raises:
        SealedError: It breaks the format, or needs a newer reader.
    """
    try:
        members = _parsed(data, limit=ENVELOPE_LIMIT)
        encryption = _typed(members, "encryption", dict)
        _check_version(encryption, name=name)
        _check_digest(data, _matching(members, "digest", _HEX64))
        manifest = _typed(encryption, "manifest", dict)
        if members.get("requires") != [FEATURE] or manifest.get("file") != SEALED_MANIFEST:
            raise ValueError("it requires what is not known here")
        return Envelope(
            format=_typed(members, "format", str),
            format_version=_typed(members, "format_version", str),
            folder=str(uuid.UUID(_typed(members, "uuid", str))),
            keys=_keys(_typed(encryption, "keys", list)),
            manifest_id=_matching(manifest, "id", _HEX32),
            files=_files(_typed(members, "files", dict)),
            generation=_typed(encryption, "generation", int),
        )
    except ValueError as error:
        if isinstance(error, SealedError):
            raise
        raise SealedError(
            name, f"is no valid envelope ({error})", remedy="restore it from a copy"
        ) from None


def _parsed(data: bytes, *, limit: int) -> dict[str, Any]:
    # Objects take far more memory than the two bytes that ask for each.
    if len(data) > limit or data.count(b"{") + data.count(b"[") > _MOST_OBJECTS:
        raise ValueError(f"its {len(data)} bytes hold more than is read")
    try:
        members = json.loads(data.decode(), object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return _checked_object(members)


def _checked_object(members: object) -> dict[str, Any]:
    if isinstance(members, dict):
        return members
    raise ValueError("it is not one object")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return members


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _typed(members: Mapping[str, Any], name: str, kind: type) -> Any:
    if type(members.get(name)) is not kind:
        raise ValueError(f"member {name!r} is not what it must be")
    return members[name]


def _matching(members: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value: str = _typed(members, name, str)
    if not pattern.fullmatch(value):
        raise ValueError(f"member {name!r} is not hex digits")
    return value


def _check_version(encryption: Mapping[str, Any], *, name: str) -> None:
    version, cipher = str(encryption.get("version"))[:40], str(encryption.get("cipher"))[:40]
    if version.partition(".")[0] != VERSION.partition(".")[0] or cipher != CIPHER:
        raise SealedError(
            name,
            f"is encrypted by version {version} with {cipher}, and version 1.x with {CIPHER} is "
            f"read here",
            remedy="install a newer release of this package",
        )


def _check_digest(data: bytes, stated: str) -> None:
    at = data.rindex(stated.encode())
    if hashlib.sha256(data[:at] + _NO_DIGEST.encode() + data[at + 64 :]).hexdigest() != stated:
        raise ValueError("its bytes don't have the digest that it names for itself")


def _keys(records: list[Any]) -> tuple[Mapping[str, Any], ...]:
    if not 0 < len(records) <= _MOST_KEYS:
        raise ValueError(f"it lists {len(records)} wrapped keys")
    return tuple(map(_key, records))


def _key(record: object) -> Mapping[str, Any]:
    if not isinstance(record, dict) or _typed(record, "kind", str) not in _KINDS:
        raise ValueError("a wrapped key is of no known kind")
    if record["kind"] == "age" and not _FILE.fullmatch(_typed(record, "file", str)):
        raise ValueError("the file of a wrapped key has no allowed name")
    return record


def _files(members: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    files = {}
    for name, record in members.items():
        if not _FILE.fullmatch(name) or not isinstance(record, dict):
            raise ValueError(f"the file name {name[:80]!r} is not allowed")
        size = _typed(record, "size", int)
        if not 0 <= size < 2**63:
            raise ValueError("a file has an impossible size")
        files[name] = (size, _matching(record, "sha256", _HEX64))
    return files


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """An unlocked folder: the manifest that was sealed, and where each of its files is."""

    envelope: Envelope
    data_key: bytes = field(repr=False)
    manifest: bytes = field(repr=False)
    """The bytes of the plain ``manifest.json``."""
    files: Mapping[str, tuple[str, bytes]]
    """For each path of the manifest the sealed file's name and its file id."""

    @property
    def digest(self) -> str:
        """SHA-256 of the plain manifest: the same before, under and after encryption."""
        return hashlib.sha256(self.manifest).hexdigest()

    def key(self, path: str) -> FileKey:
        """What the sealed file of ``path`` must be bound to."""
        return _file_key(self.data_key, self.envelope.folder, path, self.files[path][1])


def _file_key(data_key: bytes, folder: str, path: str, file_id: bytes) -> FileKey:
    return FileKey(data_key=data_key, folder=uuid.UUID(folder).bytes, path=path, file_id=file_id)


def unlock(
    envelope: Envelope,
    source: KeySource,
    *,
    read_file: Callable[[str], bytes],
    name: str,
    expect: str | None = None,
) -> Contents:
    """Open the data key and the sealed manifest of a folder.

    Args:
        envelope: Of the folder.
        source: Where the key comes from.
        read_file: Gives the bytes of a file beside the envelope.
        name: How messages call the folder.
        expect: Digest that the plain manifest must have; without it an older state of the
            folder, put back as a whole, can't be told from the newest one.

    Raises:
        SealedError: The key is wrong, or the manifest was changed or replaced.
    """
    data_key = unwrap(
        envelope.keys, folder=envelope.folder, source=source, read_file=read_file, name=name
    )
    sealed = memoryview(read_file(SEALED_MANIFEST))
    contents = _contents(envelope, sealed, data_key=data_key, name=f"{name}/{SEALED_MANIFEST}")
    if expect is not None and contents.digest != expect.lower():
        raise SealedError(
            name,
            f"has the manifest {contents.digest[:16]}..., and {expect[:16]}... was expected; it is "
            f"another one, or an older state that was put back",
            remedy="restore the right one from a copy",
        )
    return contents


def _contents(envelope: Envelope, sealed: memoryview, *, data_key: bytes, name: str) -> Contents:
    """What the sealed manifest says, whose bytes are given."""
    key = _file_key(data_key, envelope.folder, INNER_MANIFEST, bytes.fromhex(envelope.manifest_id))
    file = SealedFile(
        lambda start, count: sealed[start : start + count], len(sealed), key=key, name=name
    )
    try:
        members = _parsed(bytes(file.read(0, file.size)), limit=_MANIFEST_LIMIT)
        return Contents(
            envelope=envelope,
            data_key=data_key,
            manifest=base64.b64decode(_typed(members, "manifest", str), validate=True),
            files={path: _place(record) for path, record in _typed(members, "files", dict).items()},
        )
    except ValueError as error:
        if isinstance(error, SealedError):
            raise
        raise SealedError(name, f"holds no manifest ({error})", remedy="restore it") from None


def _place(record: object) -> tuple[str, bytes]:
    if not isinstance(record, dict) or not _FILE.fullmatch(_typed(record, "file", str)):
        raise ValueError("a file has no allowed name")
    return record["file"], bytes.fromhex(_matching(record, "id", _HEX32))


class Sealing:
    """Encrypt a folder: files first, the envelope last.

    Args:
        format: The format of what is inside, as its manifest says it.
        format_version: Likewise.
        recipients: See `wrap`.
        source: See `wrap`. It is asked here, so that hours of work don't end with a wrong key.
    """

    def __init__(
        self,
        *,
        format: str,
        format_version: str,
        recipients: Sequence[str] = (),
        source: KeySource | None = None,
    ) -> None:
        self._data_key = secrets.token_bytes(32)
        self._files: dict[str, dict[str, str]] = {}
        bare = Envelope(
            format=format,
            format_version=format_version,
            folder=str(uuid.uuid4()),
            keys=(),
            manifest_id=secrets.token_hex(16),
            files={},
            generation=0,
        )
        self._envelope, self._small = _with_keys(
            bare, self._data_key, recipients=recipients, source=source
        )

    def add(self, path: str) -> str:
        """The name of the sealed file for ``path``."""
        name = f"{len(self._files):06d}.sealed"
        self._files[path] = {"file": name, "id": secrets.token_hex(16)}
        return name

    def key(self, path: str) -> FileKey:
        """What the sealed file for a path that was added is bound to. Holds the data key."""
        file_id = bytes.fromhex(self._files[path]["id"])
        return _file_key(self._data_key, self._envelope.folder, path, file_id)

    def blocks(
        self, path: str, read: Callable[[int], Buffer], *, size: int, cut: Cut = SEGMENT_SIZE
    ) -> Iterator[bytes | bytearray]:
        """The bytes of the sealed file for a path that was added."""
        return sealed_blocks(read, size=size, cut=cut, key=self.key(path))

    def finish(
        self, manifest: bytes, files: Mapping[str, tuple[int, str]]
    ) -> tuple[bytes, dict[str, bytes]]:
        """The envelope's bytes, and the small files that belong beside it.

        Args:
            manifest: The bytes of the plain manifest.
            files: Size and SHA-256 of each sealed file that was written.
        """
        members = {"manifest": base64.b64encode(manifest).decode(), "files": self._files}
        plain = json.dumps(members, ensure_ascii=False).encode()
        envelope = self._envelope
        file_id = bytes.fromhex(envelope.manifest_id)
        key = _file_key(self._data_key, envelope.folder, INNER_MANIFEST, file_id)
        slices = iter(_slices(plain))
        sealed = b"".join(
            sealed_blocks(lambda _: next(slices), size=len(plain), cut=SEGMENT_SIZE, key=key)
        )
        small = {SEALED_MANIFEST: sealed, **self._small}
        return envelope_to_json(
            replace(envelope, files={**envelope.files, **files, **_listed(small)})
        ), small


def _slices(data: bytes) -> list[bytes]:
    return [data[at : at + SEGMENT_SIZE] for at in range(0, len(data), SEGMENT_SIZE)] or [b""]


def rewrapped(
    envelope: Envelope,
    old: KeySource,
    *,
    recipients: Sequence[str],
    new: KeySource | None,
    read_file: Callable[[str], bytes],
    name: str,
) -> tuple[Envelope, dict[str, bytes]]:
    """The envelope with the same data key wrapped anew, and the key files that it names."""
    data_key = unwrap(
        envelope.keys, folder=envelope.folder, source=old, read_file=read_file, name=name
    )
    gone = {record.get("file") for record in envelope.keys}
    kept = {each: record for each, record in envelope.files.items() if each not in gone}
    bare = replace(envelope, files=kept)
    return _with_keys(bare, data_key, recipients=recipients, source=new)


def _with_keys(
    envelope: Envelope, data_key: bytes, *, recipients: Sequence[str], source: KeySource | None
) -> tuple[Envelope, dict[str, bytes]]:
    generation = envelope.generation + 1
    records, files = [], {}
    wrapped = wrap(data_key, folder=envelope.folder, recipients=recipients, source=source)
    for each in wrapped:
        record = dict(each.record)
        if each.content is not None:
            record["file"] = f"key-{generation}.age"
            files[record["file"]] = each.content
        records.append(record)
    known = {**envelope.files, **_listed(files)}
    return replace(envelope, keys=tuple(records), files=known, generation=generation), files


def _listed(files: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    return {
        name: (len(content), hashlib.sha256(content).hexdigest()) for name, content in files.items()
    }
