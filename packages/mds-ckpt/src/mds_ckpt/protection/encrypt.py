"""Encrypt a checkpoint into a new folder, decrypt it into another, and change who holds its key.

Encrypting and decrypting write a new folder, which appears when it is whole; every plain byte is
compared with the manifest's digest on the way. Changing the key rewrites the envelope only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mds_ckpt.commit import publish_folder
from mds_ckpt.encryption.digest import PassingDigest, passing_digest
from mds_ckpt.encryption.envelope import Sealing, envelope_to_json, rewrapped
from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.encryption.segments import SEGMENT_SIZE
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.file_operations import (
    REAL,
    FileOperations,
    partial_path,
    remove_tree,
    write_file,
)
from mds_ckpt.files.lock import LOCK_NAME, lock
from mds_ckpt.files.regular_file import FrontToBack, OpenFile, RegularFile, read_whole
from mds_ckpt.files.sealed_folder import SealedFolder, read_envelope
from mds_ckpt.manifest import (
    FORMAT,
    MANIFEST_NAME,
    SIZE_LIMIT,
    CheckpointManifest,
    FileRecord,
    from_json,
)
from mds_ckpt.protection.target import prepare_target

__all__ = ["Encrypted", "decrypt_checkpoint", "encrypt_checkpoint", "rotate_key"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encrypted:
    """What was encrypted or decrypted."""

    manifest: CheckpointManifest
    digest: str
    """SHA-256 of the plain manifest: what ``expect`` takes."""
    size: int
    """Bytes of the files that were written."""


def encrypt_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    recipients: Sequence[str] = (),
    key: KeySource | None = None,
    operations: FileOperations = REAL,
) -> Encrypted:
    """Write an encrypted copy of a checkpoint of ours; the original stays as it is.

    Args:
        source: A ``step-N`` folder.
        target: The folder that is to appear.
        recipients: Public keys of age (``age1...``).
        key: A passphrase or a key command that may open it, too.
        operations: The disk.

    Raises:
        RejectedError: If the source is damaged, or nobody could open the copy.
    """
    source, target = Path(source), Path(target)
    data = read_whole(source / MANIFEST_NAME, limit=SIZE_LIMIT)
    manifest = from_json(data, path=source / MANIFEST_NAME)
    size = sum(record.size for record in manifest.files.values())
    prepare_target(target, [source], nbytes=size, operations=operations)
    sealing = Sealing(
        format=FORMAT,
        format_version=manifest.format_version,
        recipients=recipients,
        source=key,
    )
    files = {}
    with _new_folder(target, operations) as partial:
        for name, record in manifest.files.items():
            stored = sealing.add(name)
            with RegularFile(source / name).open() as file, passing_digest() as digest:
                read = _reader(file, digest)
                blocks = sealing.blocks(name, read, size=file.size)
                files[stored] = _write(partial / stored, blocks, operations)
                _compare(source / name, record, file.size, digest.hexdigest())
        envelope, small = sealing.finish(data, files)
        for name, content in {**small, MANIFEST_NAME: envelope}.items():
            write_file(partial / name, content, operations=operations)
    return Encrypted(
        manifest=manifest,
        digest=hashlib.sha256(data).hexdigest(),
        size=sum(each for each, _ in files.values()) + sum(map(len, small.values())),
    )


def decrypt_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    key: KeySource,
    expect: str | None = None,
    operations: FileOperations = REAL,
) -> Encrypted:
    """Write the plain copy of an encrypted checkpoint: the very bytes that were encrypted.

    Args:
        source: The encrypted folder.
        target: The folder that is to appear.
        key: Where the key comes from.
        expect: Digest that the plain manifest must have.
        operations: The disk.

    Raises:
        RejectedError: If the key is wrong, or something was changed.
    """
    source, target = Path(source), Path(target)
    opened = SealedFolder(source, key, expect=expect)
    data = opened.contents.manifest
    manifest = from_json(data, path=source / f"{MANIFEST_NAME} (sealed)")
    size = sum(record.size for record in manifest.files.values())
    prepare_target(target, [source], nbytes=size, operations=operations)
    with _new_folder(target, operations) as partial:
        for name, record in manifest.files.items():
            with opened.file(name, record.size).open() as file:
                written = _write(partial / name, _blocks(file), operations)
            _compare(source / name, record, *written)
        write_file(partial / MANIFEST_NAME, data, operations=operations)
    return Encrypted(manifest=manifest, digest=opened.contents.digest, size=size)


def rotate_key(
    folder: str | Path,
    *,
    old: KeySource,
    recipients: Sequence[str] = (),
    new: KeySource | None = None,
    operations: FileOperations = REAL,
) -> None:
    """Let others open an encrypted checkpoint, and those who could before no longer.

    Only the envelope is rewritten. The data key stays, so whoever kept the old envelope and its
    key can still read; against that, decrypt and encrypt anew.

    Args:
        folder: The encrypted folder.
        old: What opens it now.
        recipients: Public keys of age that open it from now on.
        new: A passphrase or a key command that opens it from now on.
        operations: The disk.
    """
    folder = Path(folder)
    read_envelope(folder)  # a wrong path should not leave a lock behind
    with lock(folder):
        envelope, files = rewrapped(
            read_envelope(folder),
            old,
            recipients=recipients,
            new=new,
            read_file=lambda name: read_whole(folder / name, limit=SIZE_LIMIT),
            name=str(folder),
        )
        temporary = partial_path(folder / MANIFEST_NAME)
        for remains in sorted(folder.glob(f"{MANIFEST_NAME}.partial-*")):
            operations.remove(remains)
        for path, content in [
            *((folder / name, content) for name, content in files.items()),
            (temporary, envelope_to_json(envelope)),
        ]:
            if path.exists():  # left by a rotation that died
                operations.remove(path)
            write_file(path, content, operations=operations)
        operations.sync_folder(folder)
        operations.replace(temporary, folder / MANIFEST_NAME)
        operations.sync_folder(folder)
        for path in sorted(folder.glob("key-*.age")):
            if path.name not in envelope.files:
                operations.remove(path)
        operations.sync_folder(folder)
    (folder / LOCK_NAME).unlink(missing_ok=True)


@contextmanager
def _new_folder(target: Path, operations: FileOperations) -> Iterator[Path]:
    partial = partial_path(target)
    operations.make_folder(partial)
    try:
        with lock(partial):
            yield partial
        operations.remove(partial / LOCK_NAME)
        publish_folder(partial, target, operations=operations)
    except (Exception, KeyboardInterrupt):
        if partial.exists():
            remove_tree(partial)
        raise


def _reader(file: OpenFile, digest: PassingDigest) -> Callable[[int], bytearray]:
    """Reads front to back, and hands what it read to the digest."""
    plain = FrontToBack(file)

    def read(count: int) -> bytearray:
        data = plain.read(count)
        digest.update(data)
        return data

    return read


def _blocks(file: OpenFile) -> Iterator[bytearray]:
    for offset in range(0, file.size, SEGMENT_SIZE):
        yield file.read(offset, min(SEGMENT_SIZE, file.size - offset))


def _write(
    path: Path, blocks: Iterable[bytes | bytearray], operations: FileOperations
) -> tuple[int, str]:
    """Write a file and force it to the disk; its size and SHA-256."""
    size, digest = 0, hashlib.sha256()
    with operations.create(path) as file:
        for block in blocks:
            operations.write(file, memoryview(block))
            digest.update(block)
            size += len(block)
        operations.sync(file)
    return size, digest.hexdigest()


def _compare(path: Path, record: FileRecord, size: int, digest: str) -> None:
    if (size, digest) != (record.size, record.sha256):
        raise RejectedError(
            path,
            "its bytes don't have the size and digest that the manifest names",
            remedy="use an older checkpoint or a copy",
        )
