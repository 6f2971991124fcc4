"""Make a folder of files appear at once, or not at all, whatever dies in between.

Writers fill ``NAME.partial-RANDOM``; one rename makes it ``NAME``. Everything that touches the disk
goes through :class:`FileOperations`, so tests can fail, kill or forget at each single operation.

Order of a save: files written and fsynced; manifest written and fsynced; folder fsynced; folder
renamed; parent fsynced (from here on it exists); ``latest`` replaced; old ones pruned.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from mds_ckpt import manifest as manifest_module
from mds_ckpt.errors import CheckpointError, RejectedError, UsageError
from mds_ckpt.files.file_operations import (
    PARTIAL,
    REAL,
    REPLACED,
    FileOperations,
    make_folders,
    partial_path,
    remove_tree,
    replace_file,
    write_file,
)
from mds_ckpt.files.lock import lock
from mds_ckpt.files.regular_file import OpenFile, RegularFile, read_whole
from mds_ckpt.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord

__all__ = [
    "REAL",
    "FileOperations",
    "Latest",
    "Skipped",
    "check_files",
    "check_folder",
    "clean",
    "digest",
    "find_latest",
    "lock",
    "make_folders",
    "prune",
    "publish",
    "publish_files",
    "publish_folder",
    "read_manifest",
    "replace_file",
    "settle_replaced",
    "stage",
    "step_folders",
    "unfinished",
]

LATEST_NAME = "latest"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_REMAINS = re.compile(
    rf"({_STEP.pattern}|{LATEST_NAME}){re.escape(PARTIAL)}[0-9a-z]{{4,32}}"
    rf"|{_STEP.pattern}{re.escape(REPLACED)}[0-9a-z]{{4,32}}"
)


# One checkpoint in a folder of checkpoints ------------------------------------------------------


def stage(root: Path, step: int, *, operations: FileOperations = REAL) -> Path:
    """A new, empty partial folder for the checkpoint of ``step``.

    One process calls this (rank 0, which tells the others the name) and holds :func:`lock`:
    remains of saves that died are removed first.
    """
    make_folders(root, operations=operations)
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
    last = {MANIFEST_NAME: manifest_module.to_json(manifest)}
    return publish_files(
        partial, last, step=manifest.step, root=root, existing=existing, operations=operations
    )


def publish_files(
    partial: Path,
    last: Mapping[str, bytes],
    *,
    step: int,
    root: Path,
    existing: Literal["refuse", "replace"] = "refuse",
    operations: FileOperations = REAL,
) -> Path:
    """As :func:`publish`, where the manifest is given as bytes.

    Args:
        partial: As there.
        last: Content by name of the files that are still to be written, the manifest behind all.
        step: Of the checkpoint.
        root: As there.
        existing: As there.
        operations: As there.
    """
    target = root / f"step-{step}"
    if os.path.lexists(target) and existing == "refuse":
        raise UsageError(
            f"{target} is there already and a checkpoint is never written into; "
            f"remove it, or publish with existing='replace'"
        )
    for name, data in last.items():
        write_file(partial / name, data, operations=operations)
    publish_folder(partial, target, operations=operations)
    replace_file(root / LATEST_NAME, f"{target.name}\n".encode(), operations=operations)
    return target


def publish_folder(partial: Path, target: Path, *, operations: FileOperations = REAL) -> None:
    """Give a finished partial folder its name; what had the name is moved away, then removed.

    A kill between the two renames leaves the old folder under another name:
    :func:`settle_replaced` puts it back.
    """
    operations.sync_folder(partial)
    old = None
    if os.path.lexists(target):
        old = partial_path(target, kind=REPLACED)
        operations.rename(target, old)
    operations.rename(partial, target)
    operations.sync_folder(target.parent)
    if old is not None:
        remove_tree(old, operations=operations)


def settle_replaced(old: Path, target: Path, *, operations: FileOperations = REAL) -> None:
    """Finish a replacement that died: put the old folder back, or remove it if it has a heir."""
    if os.path.lexists(target):
        remove_tree(old, operations=operations)
    else:
        operations.rename(old, target)
        operations.sync_folder(target.parent)


def clean(root: Path, *, operations: FileOperations = REAL) -> list[Path]:
    """Remove what interrupted saves left in ``root``, and return it. Hold :func:`lock`."""
    remains = [entry for entry in sorted(root.iterdir()) if _REMAINS.fullmatch(entry.name)]
    for entry in remains:
        name, _, kept = entry.name.partition(REPLACED)
        if kept:
            settle_replaced(entry, root / name, operations=operations)
        elif entry.is_dir() and not entry.is_symlink():
            remove_tree(entry, operations=operations)
        else:
            operations.remove(entry)
    return remains


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
            check_files(folder, digests=digests)
        except CheckpointError as error:
            skipped.append(Skipped(folder, str(error)))
        else:
            return Latest(folder, skipped)
    return Latest(None, skipped)


def unfinished(root: Path) -> list[Path]:
    """What saves that died have left of step folders in ``root``, the newest step first."""
    if not root.is_dir():
        return []
    found = [
        (int(name[2]), entry)
        for entry in root.iterdir()
        if PARTIAL in entry.name and (name := _REMAINS.fullmatch(entry.name)) and name[2]
    ]
    return [entry for _, entry in sorted(found, reverse=True)]


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
    _check_listed(folder, manifest.files, digests=digests)
    if digests and not manifest.has_digest and manifest.producer["name"].startswith("mds-"):
        raise RejectedError(
            folder / MANIFEST_NAME,
            "it lost the digest of itself that it was given",
            remedy="use an older checkpoint or a copy",
        )
    return manifest


def check_files(folder: Path, *, digests: bool) -> None:
    """Refuse a checkpoint whose files are not all there; an encrypted one takes no key for it."""
    from mds_ckpt.files.sealed_folder import is_sealed, read_envelope

    if not is_sealed(folder):
        check_folder(folder, digests=digests)
        return
    listed = read_envelope(folder).files.items()
    records = {name: FileRecord(size=size, sha256=sha256) for name, (size, sha256) in listed}
    _check_listed(folder, records, digests=digests)


def _check_listed(folder: Path, files: Mapping[str, FileRecord], *, digests: bool) -> None:
    for name, record in files.items():
        with RegularFile(folder / name).open() as file:
            fault = None
            if file.size != record.size:
                fault = f"it has {file.size} bytes where the manifest says {record.size}"
            elif digests and digest(file) != record.sha256:
                fault = "its bytes don't have the digest that the manifest names"
        if fault is not None:
            raise RejectedError(folder / name, fault, remedy="use an older checkpoint or a copy")


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
        check_files(folder, digests=False)
    except CheckpointError:
        return False
    return True
