"""Make a folder of files appear at once, or not at all, whatever dies in between.

Writers fill ``NAME.partial-RANDOM``; one rename makes it ``NAME``. Everything that touches the disk
goes through :class:`FileOperations`, so tests can fail, kill or forget at each single operation.

Order of a save: files written and fsynced; manifest written and fsynced; folder fsynced; folder
renamed; parent fsynced (from here on it exists); ``latest`` replaced; old ones pruned.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from mds_ckpt import manifest as manifest_module
from mds_ckpt.errors import CheckpointError, LockedError, RejectedError, UsageError
from mds_ckpt.manifest import MANIFEST_NAME, CheckpointManifest
from mds_ckpt.regular_file import OpenFile, RegularFile, read_whole

LATEST_NAME = "latest"
LOCK_NAME = ".mds-lock"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_PARTIAL = ".partial-"


class FileOperations:
    """Every way in which this package changes the disk. Tests replace it."""

    def make_folder(self, path: Path) -> None:
        """Create one folder; its parent exists, itself does not."""
        path.mkdir()

    def create(self, path: Path) -> BinaryIO:
        """A new file for writing; refuses an existing one, also a dangling link."""
        return path.open("xb", buffering=0)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        """Write all of ``data``."""
        done = 0
        while done < len(data):
            done += file.write(data[done : done + (64 << 20)]) or 0

    def sync(self, file: BinaryIO) -> None:
        """Force a file's bytes to the disk."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Force a folder's entries to the disk, where the system can (not on Windows)."""
        if os.name == "nt":  # pragma: no cover
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give a folder a name that nothing has."""
        if os.path.lexists(target):
            raise FileExistsError(f"{target} exists already")
        source.rename(target)

    def replace(self, source: Path, target: Path) -> None:
        """Put a file in the place of another."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Delete an empty folder."""
        path.rmdir()


REAL = FileOperations()


def partial_path(target: Path) -> Path:
    """A fresh name beside ``target`` for writing what will become it."""
    return target.with_name(f"{target.name}{_PARTIAL}{secrets.token_hex(4)}")


def write_file(path: Path, data: bytes, *, operations: FileOperations = REAL) -> None:
    """Write a new file and force it to the disk."""
    with operations.create(path) as file:
        operations.write(file, memoryview(data))
        operations.sync(file)


def remove_tree(path: Path, *, operations: FileOperations = REAL) -> None:
    """Delete a folder and what it holds; links are deleted, never followed."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry, operations=operations)
        else:
            operations.remove(entry)
    operations.remove_folder(path)


# One checkpoint in a folder of checkpoints ------------------------------------------------------


def stage(root: Path, step: int, *, operations: FileOperations = REAL) -> Path:
    """A new, empty partial folder for the checkpoint of ``step``.

    One process calls this (rank 0, which tells the others the name) and holds :func:`lock`:
    remains of saves that died are removed first.
    """
    if not root.is_dir():
        root.mkdir(parents=True)
        operations.sync_folder(root.parent)
    clean(root, operations=operations)
    partial = partial_path(root / f"step-{step}")
    operations.make_folder(partial)
    return partial


def publish(
    partial: Path,
    manifest: CheckpointManifest,
    *,
    root: Path,
    existing: Literal["refuse", "replace"] = "refuse",
    operations: FileOperations = REAL,
) -> Path:
    """Turn a filled partial folder into ``root/step-N`` and point ``latest`` at it.

    Args:
        partial: From :func:`stage`; every file in it was written and fsynced by its rank.
        manifest: Describes the files; written last.
        root: The folder of checkpoints.
        existing: What to do with a ``step-N`` that is there already: refuse, or move it away first
            (a run that was resumed from before it saves the step again).
        operations: The disk.

    Returns:
        The checkpoint's folder.
    """
    target = root / f"step-{manifest.step}"
    if os.path.lexists(target) and existing == "refuse":
        raise UsageError(
            f"{target} is there already and a checkpoint is never written into; "
            f"remove it, or publish with existing='replace'"
        )
    data = manifest_module.to_json(manifest)
    write_file(partial / MANIFEST_NAME, data, operations=operations)
    publish_folder(partial, target, operations=operations)
    _replace_text(root / LATEST_NAME, f"{target.name}\n", operations=operations)
    return target


def publish_folder(partial: Path, target: Path, *, operations: FileOperations = REAL) -> None:
    """Give a finished partial folder its name; what had the name is moved away, then removed."""
    operations.sync_folder(partial)
    old = None
    if os.path.lexists(target):
        old = partial_path(target)
        operations.rename(target, old)
    operations.rename(partial, target)
    operations.sync_folder(target.parent)
    if old is not None:
        remove_tree(old, operations=operations)


def _replace_text(path: Path, text: str, *, operations: FileOperations) -> None:
    temporary = partial_path(path)
    write_file(temporary, text.encode(), operations=operations)
    operations.replace(temporary, path)
    operations.sync_folder(path.parent)


def clean(root: Path, *, operations: FileOperations = REAL) -> list[Path]:
    """Remove what interrupted saves left in ``root``, and return it. Hold :func:`lock`."""
    remains = [entry for entry in sorted(root.iterdir()) if _is_remains(entry.name)]
    for entry in remains:
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(entry, operations=operations)
        else:
            operations.remove(entry)
    return remains


def _is_remains(name: str) -> bool:
    stem, partial, random = name.rpartition(_PARTIAL)
    known = stem == LATEST_NAME or _STEP.fullmatch(stem)
    return bool(partial and known and re.fullmatch(r"[0-9a-z]{4,32}", random))


# Finding and pruning -----------------------------------------------------------------------------


class Skipped(NamedTuple):
    """A step folder that was passed over, and why."""

    folder: Path
    reason: str


class Latest(NamedTuple):
    """The newest good checkpoint, None if there is none, and the newer ones that are not good."""

    folder: Path | None
    skipped: list[Skipped]


def step_folders(root: Path) -> list[Path]:
    """The ``step-N`` folders of ``root``, newest first."""
    steps = [
        (int(found[1]), entry)
        for entry in root.iterdir()
        if (found := _STEP.fullmatch(entry.name)) is not None
    ]
    return [entry for _, entry in sorted(steps, reverse=True)]


def find_latest(root: Path, *, digests: bool = True) -> Latest:
    """The newest checkpoint of ``root`` whose manifest verifies, whatever ``latest`` says.

    Args:
        root: The folder of checkpoints; one that does not exist holds none.
        digests: Compare the files' digests too, not only their names and sizes.
    """
    skipped: list[Skipped] = []
    if not root.is_dir():
        return Latest(None, skipped)
    for folder in step_folders(root):
        try:
            check_folder(folder, digests=digests)
        except CheckpointError as error:
            skipped.append(Skipped(folder, str(error)))
        else:
            return Latest(folder, skipped)
    return Latest(None, skipped)


def read_manifest(folder: Path) -> CheckpointManifest:
    """The checked manifest of a checkpoint folder."""
    if folder.is_symlink():
        raise RejectedError(folder, "it is a link", remedy="name the folder that it leads to")
    path = folder / MANIFEST_NAME
    data = read_whole(path, limit=manifest_module.SIZE_LIMIT)
    return manifest_module.from_json(data, path=path)


def check_folder(folder: Path, *, digests: bool) -> CheckpointManifest:
    """The manifest of a checkpoint whose files are all there and of the right sizes."""
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        with RegularFile(folder / name).open() as file:
            fault = None
            if file.size != record.size:
                fault = f"it has {file.size} bytes where the manifest says {record.size}"
            elif digests and digest(file) != record.sha256:
                fault = "its bytes don't have the digest that the manifest names"
        if fault is not None:
            raise RejectedError(folder / name, fault, remedy="use an older checkpoint or a copy")
    return manifest


def digest(file: OpenFile) -> str:
    """The sha256 of an open file, in hex."""
    total = hashlib.sha256()
    buffer = memoryview(bytearray(min(file.size, 4 << 20)))
    for offset in range(0, file.size, 4 << 20):
        part = buffer[: min(4 << 20, file.size - offset)]
        file.read_into(part, offset)
        total.update(part)
    return total.hexdigest()


def prune(
    root: Path,
    *,
    keep_last: int,
    keep_every: int | None = None,
    operations: FileOperations = REAL,
) -> list[Path]:
    """Remove old checkpoints and return them. Hold :func:`lock`.

    Args:
        root: The folder of checkpoints.
        keep_last: This many of the newest complete ones stay; at least 1.
        keep_every: Checkpoints of steps that are a multiple of this stay as well.
        operations: The disk.

    Folders that are not complete checkpoints are neither counted nor touched.
    """
    if keep_last < 1 or (keep_every is not None and keep_every < 1):
        raise UsageError(f"keep_last ({keep_last}) and keep_every ({keep_every}) are at least 1")
    complete = [folder for folder in step_folders(root) if _is_complete(folder)]
    old = [
        folder
        for folder in complete[keep_last:]
        if keep_every is None or int(folder.name.removeprefix("step-")) % keep_every
    ]
    for folder in old:
        doomed = partial_path(folder)
        operations.rename(folder, doomed)
        operations.sync_folder(root)
        remove_tree(doomed, operations=operations)
    return old


def _is_complete(folder: Path) -> bool:
    try:
        check_folder(folder, digests=False)
    except CheckpointError:
        return False
    return True


# Locks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock."""

    pid: int
    host: str
    since: str


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the only right to write into ``folder``; LockedError says who has it.

    The system drops the lock when its holder dies, so a dead holder never blocks anyone.
    """
    path = folder / LOCK_NAME
    if path.is_symlink():
        raise RejectedError(path, "it is a link", remedy="remove it, locks are plain files")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _try_lock(descriptor):
            raise LockedError(f"{folder} is being written by another process{_holder(descriptor)}")
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0) if hasattr(os, "pwrite") else os.write(
            descriptor, text.encode()
        )
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    with suppress(ValueError, KeyError, OSError, TypeError):
        os.lseek(descriptor, 0, os.SEEK_SET)
        holder = Holder(**json.loads(os.read(descriptor, 1000)))
        return f" ({holder.pid} on {holder.host}, since {holder.since})"
    return ""


if os.name == "nt":  # pragma: no cover
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # beyond the text, so that others can read it
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        os.lseek(descriptor, 0, os.SEEK_SET)
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
