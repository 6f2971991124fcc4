"""Encrypt a store into a new folder, decrypt it into another, and change who holds its key.

Encrypting and decrypting write a new folder, which appears when it is whole; every plain byte is
compared with the manifest's digest on the way. Changing the key rewrites the envelope only.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mds_data.encryption.digest import PassingDigest, passing_digest
from mds_data.encryption.envelope import Sealing, envelope_to_json, rewrapped
from mds_data.encryption.keys import KeySource
from mds_data.encryption.segments import SEGMENT_SIZE, Cut, cut_at
from mds_data.errors import DamagedError, StoreError
from mds_data.store.array_metadata import ArrayLayout, array_layout_from_json
from mds_data.store.commit import (
    FileOperations,
    OutputFile,
    PartialFolder,
    check_free_name,
    make_folders,
    pending_name,
    put_file,
    sweep,
)
from mds_data.store.folder import StoreFolder, read_manifest, read_plain_file
from mds_data.store.lock import StoreLock
from mds_data.store.records import FileRecord, Manifest
from mds_data.store.schema import FORMAT_NAME, MANIFEST_LIMIT, MANIFEST_NAME
from mds_data.store.sealed_folder import SealedFolder, read_envelope
from mds_data.store.shard import decode_index

__all__ = ["Encrypted", "decrypt_store", "encrypt_store", "rotate_key"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encrypted:
    """What was encrypted or decrypted."""

    manifest: Manifest
    digest: str
    """SHA-256 of the plain manifest: what ``expect`` takes."""
    size: int
    """Bytes of the files that were written."""


def encrypt_store(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    recipients: Sequence[str] = (),
    key: KeySource | None = None,
    operations: FileOperations | None = None,
) -> Encrypted:
    """Write an encrypted copy of a store; the store itself stays as it is.

    Args:
        source: The store.
        target: The new folder.
        recipients: Public keys of age (``age1...``).
        key: A passphrase or a key command that may open it, too.
        operations: Where file operations go.

    Raises:
        StoreError: The source is no sound plain store, or nobody could open the copy.
    """
    root = Path(source)
    manifest, data = read_manifest(root)
    if manifest.segments:
        raise StoreError(
            f"{root}: is made of segments; write it as one store first (mds-data repack, or merge "
            f"--rewrite), then encrypt that"
        )
    folder = StoreFolder(root, manifest)
    check_free_name(Path(target))
    sealing = Sealing(
        format=FORMAT_NAME,
        format_version=manifest.format_version,
        recipients=recipients,
        source=key,
    )
    files = {}
    with _new_folder(Path(target), operations) as partial:
        for path in manifest.files:
            name = sealing.add(path)
            record = _seal_file(folder, path, partial.file(name), sealing, partial.operations)
            files[name] = (record.size, record.sha256)
        envelope, small = sealing.finish(data, files)
        for name, content in small.items():
            put_file(partial.file(name), content, operations=partial.operations)
        _publish(partial, envelope)
    size = sum(each for each, _ in files.values()) + sum(map(len, small.values()))
    return Encrypted(manifest=manifest, digest=hashlib.sha256(data).hexdigest(), size=size)


def decrypt_store(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    key: KeySource,
    expect: str | None = None,
    operations: FileOperations | None = None,
) -> Encrypted:
    """Write the plain copy of an encrypted store: the very bytes that were encrypted.

    Args:
        source: The encrypted store.
        target: The new folder.
        key: Where the key comes from.
        expect: Digest that the plain manifest must have.
        operations: Where file operations go.

    Raises:
        StoreError: The key is wrong, or something was changed.
    """
    folder = SealedFolder(Path(source), key, expect=expect)
    check_free_name(Path(target))
    with _new_folder(Path(target), operations) as partial:
        for path, record in folder.manifest.files.items():
            written = _open_file(folder, path, partial.file(path), partial.operations)
            if written != record:
                raise _differs(folder.root / path)
        _publish(partial, folder.contents.manifest)
    size = sum(record.size for record in folder.manifest.files.values())
    return Encrypted(manifest=folder.manifest, digest=folder.contents.digest, size=size)


def rotate_key(
    path: str | os.PathLike[str],
    *,
    old: KeySource,
    recipients: Sequence[str] = (),
    new: KeySource | None = None,
    operations: FileOperations | None = None,
) -> None:
    """Let others open an encrypted store, and those who could before no longer.

    Only the envelope is rewritten. The data key stays, so whoever kept the old envelope and its
    key can still read; against that, decrypt and encrypt anew.

    Args:
        path: The encrypted store.
        old: What opens it now.
        recipients: Public keys of age that open it from now on.
        new: A passphrase or a key command that opens it from now on.
        operations: Where file operations go.
    """
    root, disk = Path(path), operations or FileOperations()
    read_envelope(root)  # a wrong path should not leave a lock behind
    with StoreLock(root):
        before = read_envelope(root)
        after, files = rewrapped(
            before,
            old,
            recipients=recipients,
            new=new,
            read_file=lambda name: read_plain_file(root / name, limit=MANIFEST_LIMIT),
            name=str(root),
        )
        waiting = root / pending_name(MANIFEST_NAME, revision=after.generation)
        for place, data in [
            *((root / name, content) for name, content in files.items()),
            (waiting, envelope_to_json(after)),
        ]:
            if os.path.lexists(place):  # left by a rotation that died
                disk.remove(place)
            put_file(place, data, operations=disk)
        disk.sync_folder(root)
        disk.rename(waiting, root / MANIFEST_NAME)
        disk.sync_folder(root)
        for old_file in sorted(root.glob("key-*.age")):
            if old_file.name not in after.files:
                disk.remove(old_file)
        disk.sync_folder(root)


@contextmanager
def _new_folder(target: Path, operations: FileOperations | None) -> Iterator[PartialFolder]:
    disk = operations or FileOperations()
    make_folders(target.parent, operations=disk)
    with StoreLock(target):
        sweep(target)
        partial = PartialFolder(target, operations=disk)
        try:
            yield partial
        finally:
            partial.discard()


def _publish(partial: PartialFolder, manifest: bytes) -> None:
    partial.sync_folders()
    put_file(partial.path / MANIFEST_NAME, manifest, operations=partial.operations)
    partial.operations.sync_folder(partial.path)
    partial.give_name()


def _seal_file(
    folder: StoreFolder, path: str, target: Path, sealing: Sealing, operations: FileOperations
) -> FileRecord:
    """Write the sealed form of one file, whose plain bytes must be the manifest's."""
    cut = _cut(folder, path)
    handle, size = folder.open(path)
    with os.fdopen(handle, "rb", buffering=0) as file, passing_digest() as digest:
        output = OutputFile(target, operations=operations)
        try:
            for block in sealing.blocks(path, _reader(file, digest), size=size, cut=cut):
                output.write(block)
            if digest.hexdigest() != folder.manifest.files[path].sha256:
                raise _differs(folder.root / path)
            return output.close()
        finally:
            output.abandon()


def _reader(file: io.FileIO, digest: PassingDigest) -> Callable[[int], bytearray]:
    """Reads front to back, and hands what it read to the digest."""

    def read(count: int) -> bytearray:
        data = bytearray(count)
        done, view = 0, memoryview(data)
        while done < count and (more := file.readinto(view[done:])):
            done += more
        if done < count:
            raise StoreError(f"{file.name!r}: ended while it was read; restore it from a copy")
        digest.update(data)
        return data

    return read


def _open_file(
    folder: SealedFolder, path: str, target: Path, operations: FileOperations
) -> FileRecord:
    file = folder.file(path)
    output = OutputFile(target, operations=operations)
    try:
        for block in file.blocks():
            output.write(block)
        return output.close()
    finally:
        output.abandon()


def _differs(path: Path) -> DamagedError:
    return DamagedError(f"{path}: has not the digest of the manifest; restore it from a copy")


def _cut(folder: StoreFolder, path: str) -> Cut:
    """Where the segments of a file end: one for each inner chunk of a shard."""
    name, is_shard, number = path.rpartition("/c/")
    metadata = f"{name}/zarr.json"
    if not is_shard or not number.isdecimal() or metadata not in folder.manifest.files:
        return SEGMENT_SIZE
    layout = array_layout_from_json(folder.read(metadata), name=str(folder.root / metadata))
    return _cut_shard(folder, path, layout, int(number))


def _cut_shard(folder: StoreFolder, path: str, layout: ArrayLayout, number: int) -> Cut:
    per_shard = layout.chunks_per_shard
    used = max(0, min(per_shard, layout.num_chunks - number * per_shard))
    handle, size = folder.open(path)
    with os.fdopen(handle, "rb") as file:
        file.seek(max(0, size - layout.index_size))
        tail = file.read()
    index = decode_index(
        tail, layout=layout, file_size=size, used=used, name=str(folder.root / path)
    )
    starts = [int(start) for start in index[:used, 0]]
    ends = [int(start) + int(length) for start, length in index[:used]]
    return cut_at([*starts, *ends, size - layout.index_size], size)
