"""Back up checkpoints and stores to a second place, and bring them back.

A backup is incremental by content: a file that is there already, from whatever folder, is not
copied again. A snapshot's file is written last, so a backup that dies leaves the earlier ones as
they were. What is read back is compared with its digest, always.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mds_ckpt.checks import Problem
from mds_ckpt.commit import publish_folder
from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.errors import CheckpointError, RejectedError, SealedError, UsageError
from mds_ckpt.escape import printable
from mds_ckpt.files.file_operations import REAL, FileOperations, partial_path, remove_tree
from mds_ckpt.files.lock import LOCK_NAME, lock
from mds_ckpt.files.regular_file import FrontToBack, RegularFile, name_fault
from mds_ckpt.files.sealed_folder import is_sealed
from mds_ckpt.manifest import FileRecord
from mds_ckpt.protection.places import LocalPlace, Place, open_place
from mds_ckpt.protection.snapshot import Snapshot, files_of, new_file_name, snapshot_name
from mds_ckpt.protection.target import prepare_target
from mds_ckpt.protection.vault import Vault, create_vault, open_vault
from mds_ckpt.verification import verify

__all__ = [
    "BackedUp",
    "back_up",
    "backup_names",
    "check_backups",
    "drill",
    "prune_backups",
    "restore",
    "snapshots",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackedUp:
    """What a backup did."""

    snapshot: Snapshot
    copied: int
    """Files that were not there before."""
    nbytes: int
    """Bytes of these."""


def back_up(
    folder: str | Path,
    to: str | Path,
    *,
    name: str | None = None,
    recipients: Sequence[str] = (),
    key: KeySource | None = None,
    operations: FileOperations = REAL,
) -> BackedUp:
    """Back up the folder of one checkpoint or token store.

    Args:
        folder: It; an encrypted one is taken as it is.
        to: A local folder, or a URL of fsspec.
        name: What it is called there; its own name if None.
        recipients: If there are no backups yet: age public keys that may open them.
        key: Opens encrypted backups; if there are none yet, they will be encrypted for it.
        operations: The disk, for a local folder.

    Raises:
        RejectedError: If the folder is damaged, or the place is something else.
        LockedError: If another process writes there.
    """
    folder = Path(folder)
    name = Path(os.path.realpath(folder)).name if name is None else name
    if (fault := name_fault(name)) is not None or "~" in name:
        raise UsageError(f"the name {name!r} {fault or 'holds a ~'}; give another with --name")
    kind, files = files_of(folder)
    place = open_place(to, operations=operations)
    _check_place(place, folder)
    with place.writing():
        vault = open_vault(place, key) or create_vault(place, recipients=recipients, key=key)
        copied = _copy_missing(vault, folder, files)
        snapshot = Snapshot(name=name, format=kind, created=_now(), files=files)
        if _newest_digest(vault, name) != snapshot.digest:
            vault.write_snapshot(new_file_name(name), snapshot.to_json())
        # Where there is no lock, another process may have removed what no snapshot named yet.
        copied += _copy_missing(vault, folder, files)
    return BackedUp(
        snapshot=snapshot, copied=len(copied), nbytes=sum(record.size for record in copied)
    )


def _check_place(place: Place, folder: Path) -> None:
    """Refuse to put backups where the originals lie."""
    if not isinstance(place, LocalPlace):
        return
    root, own = Path(os.path.realpath(place.root)), Path(os.path.realpath(folder))
    if root.is_relative_to(own) or root == own.parent:
        raise UsageError(
            f"{place.name} is where {printable(str(folder))} itself lies; name another place, best "
            f"on another disk"
        )


def _copy_missing(vault: Vault, folder: Path, files: dict[str, FileRecord]) -> list[FileRecord]:
    missing = {vault.object_name(each): (path, each) for path, each in files.items()}
    copied = []
    for path, record in missing.values():
        if vault.has(record):
            continue
        with RegularFile(folder / path).open() as file:
            if file.size != record.size:
                raise RejectedError(
                    folder / path,
                    f"it has {file.size} bytes where the manifest says {record.size}",
                    remedy="back up a whole folder",
                )
            try:
                vault.put(record, FrontToBack(file).read)
            except ValueError as error:
                if isinstance(error, CheckpointError):
                    raise
                raise RejectedError(
                    folder / path, str(error), remedy="back up a whole folder"
                ) from None
        copied.append(record)
    return copied


def _newest_digest(vault: Vault, name: str) -> str | None:
    """Manifest digest of the newest snapshot of a name; one that can't be read counts as none."""
    with suppress(RejectedError):
        return _find(vault, name)[1].digest
    return None


def backup_names(to: str | Path) -> list[str]:
    """Names of what is backed up at a place, the oldest first; takes no key."""
    found = [snapshot_name(file) for file in open_place(to).names("snapshots")]
    return [name for name, _ in sorted(filter(None, found), key=lambda parts: parts[1])]


def snapshots(to: str | Path, *, key: KeySource | None = None) -> list[Snapshot]:
    """All snapshots at a place, the oldest first."""
    vault = _vault(open_place(to), key)
    return [_read(vault, file) for file in _files(vault)]


def restore(
    to: str | Path,
    target: str | Path,
    *,
    name: str | None = None,
    key: KeySource | None = None,
    expect: str | None = None,
    operations: FileOperations = REAL,
) -> Snapshot:
    """Bring a folder back: the very bytes that were backed up.

    Args:
        to: The place of the backups.
        target: The folder that is to appear.
        name: Which one; the newest of all if None.
        key: Opens encrypted backups.
        expect: SHA-256 that its manifest must have.
        operations: The disk.

    Raises:
        RejectedError: If it is not there, damaged, or not the expected one.
    """
    target = Path(target)
    vault = _vault(open_place(to), key)
    _, snapshot = _find(vault, name)
    _check_expected(vault, snapshot, expect)
    prepare_target(target, [], nbytes=snapshot.nbytes, operations=operations)
    partial = partial_path(target)
    operations.make_folder(partial)
    try:
        with lock(partial):
            _write_files(vault, snapshot, partial, operations)
        operations.remove(partial / LOCK_NAME)
        publish_folder(partial, target, operations=operations)
    except (Exception, KeyboardInterrupt):
        if partial.exists():
            remove_tree(partial)
        raise
    return snapshot


def _write_files(
    vault: Vault, snapshot: Snapshot, folder: Path, operations: FileOperations
) -> None:
    made = {folder}
    for path, record in snapshot.files.items():
        for above in reversed(Path(path).parents[:-1]):
            if folder / above not in made:
                operations.make_folder(folder / above)
                made.add(folder / above)
        with operations.create(folder / path) as file:
            for block in vault.get(record):
                operations.write(file, memoryview(block))
            operations.sync(file)
    for each in sorted(made - {folder}, reverse=True):
        operations.sync_folder(each)


def _check_expected(vault: Vault, snapshot: Snapshot, expect: str | None) -> None:
    if expect is not None and snapshot.digest != expect.lower():
        raise SealedError(
            f"{vault.place.name} ({snapshot.name})",
            f"its manifest has the digest {snapshot.digest[:16]}..., and {expect[:16]}... was "
            f"expected",
            remedy="use another backup",
        )


def drill(
    to: str | Path,
    *,
    name: str | None = None,
    key: KeySource | None = None,
    expect: str | None = None,
) -> tuple[Snapshot, list[Problem]]:
    """Restore into a temporary folder, check all of it, and remove it again.

    Returns:
        What was restored, and what is wrong with it.
    """
    with tempfile.TemporaryDirectory(prefix="mds-drill-") as folder:
        target = Path(folder) / "restored"
        snapshot = _find(_vault(open_place(to), key), name)[1]
        try:
            restore(to, target, name=name, key=key, expect=expect)
        except RejectedError as error:
            return snapshot, [Problem(file=error.path, reason=error.reason)]
        found = list(_differences(target, snapshot))
        if snapshot.format == "mds-checkpoint" and not is_sealed(target):
            found += verify(target, format="mds").problems
        return snapshot, found


def _differences(folder: Path, snapshot: Snapshot) -> Iterator[Problem]:
    """What is not on the disk as the snapshot says."""
    for path, record in snapshot.files.items():
        with (folder / path).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                yield Problem(file=path, reason="it was restored with other bytes")


def check_backups(
    to: str | Path, *, name: str | None = None, key: KeySource | None = None
) -> tuple[int, int, list[Problem]]:
    """Read every object that a snapshot names and compare it.

    Args:
        to: The place of the backups.
        name: Only snapshots of this name.
        key: Opens encrypted backups.

    Returns:
        How many snapshots and bytes were checked, and what is wrong.
    """
    vault = _vault(open_place(to), key)
    problems: list[Problem] = []
    objects: dict[str, FileRecord] = {}
    files = _files(vault, name)
    for file in files:
        try:
            records = _read(vault, file).files.values()
        except RejectedError as error:
            problems.append(Problem(file=file, reason=error.reason))
        else:
            objects |= {vault.object_name(record): record for record in records}
    for path, record in objects.items():
        try:
            for _ in vault.get(record):
                pass
        except RejectedError as error:
            problems.append(Problem(file=path, reason=error.reason))
    return len(files), sum(record.size for record in objects.values()), problems


def prune_backups(
    to: str | Path,
    *,
    keep: Callable[[Sequence[str]], Iterable[str]],
    key: KeySource | None = None,
    operations: FileOperations = REAL,
) -> list[str]:
    """Remove snapshots, and the objects that no other snapshot names.

    Only one process may prune a place at a URL, since there is no lock there.

    Args:
        to: The place of the backups.
        keep: Says of the names of all snapshots, the oldest first, which ones stay.
        key: Opens encrypted backups.
        operations: The disk, for a local folder.

    Returns:
        The names of the snapshots that were removed.
    """
    place = open_place(to, operations=operations)
    with place.writing():
        vault = _vault(place, key)
        files = {file: str((snapshot_name(file) or ("",))[0]) for file in _files(vault)}
        kept = set(keep(list(files.values())))
        gone = [file for file, name in files.items() if name not in kept]
        used = {
            vault.object_name(record)
            for file in files
            if file not in gone
            for record in _read(vault, file).files.values()
        }
        for file in gone:
            place.remove(file)
        for path in place.names("objects") if gone else ():
            if path not in used:
                place.remove(path)
    return [files[file] for file in gone]


def _vault(place: Place, key: KeySource | None) -> Vault:
    vault = open_vault(place, key)
    if vault is None:
        raise RejectedError(
            place.name, "there are no backups", remedy="check the place, or back up first"
        )
    return vault


def _files(vault: Vault, name: str | None = None) -> list[str]:
    """The files of snapshots, the oldest first."""
    found = [
        (parts[1], file, parts[0])
        for file in vault.place.names("snapshots")
        if (parts := snapshot_name(file)) is not None
    ]
    return [file for _, file, of in sorted(found) if name is None or of == name]


def _find(vault: Vault, name: str | None) -> tuple[str, Snapshot]:
    """The newest snapshot of a name, or of all."""
    files = _files(vault, name)
    if not files:
        known = sorted({str((snapshot_name(file) or ("",))[0]) for file in _files(vault)})
        raise RejectedError(
            vault.place.name,
            f"there is no backup called {name!r}" if name else "there are no backups",
            remedy=f"take one of {', '.join(known[:20])}" if known else "back up first",
        )
    return files[-1], _read(vault, files[-1])


def _read(vault: Vault, file: str) -> Snapshot:
    snapshot = Snapshot.from_json(vault.read_snapshot(file), path=f"{vault.place.name}/{file}")
    found = snapshot_name(file)
    if found is None or snapshot.name != found[0]:
        raise RejectedError(
            f"{vault.place.name}/{file}",
            f"it is a snapshot of {snapshot.name!r}, not of what its name says",
            remedy="use an older snapshot",
        )
    return snapshot


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
