"""The second place of a run's checkpoints: copied after the commit, compared, then committed there.

A folder has the form of a run's: ``config.toml`` and ``checkpoints/``, so `mds-train resume` and
`checkpoint.load` take it as they take the run itself. A URL holds backups of `mds_ckpt.protection`,
by content and encrypted on request.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from mds_ckpt import CheckpointError, KeySource, commit
from mds_ckpt.manifest import MANIFEST_NAME, FileRecord
from mds_ckpt.protection import backup as backups
from mds_ckpt.protection.places import is_url
from mds_ckpt.protection.retention import newest_steps
from mds_ckpt.protection.snapshot import files_of

__all__ = ["back_up", "backed_up_steps", "bring_back", "copy_checkpoint", "is_url"]

_BLOCK = 16 << 20
_CONFIG = "config.toml"
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def back_up(
    source: Path,
    place: Path | str,
    *,
    keep_last: int,
    keep_every: int | None,
    identity: str | None = None,
) -> Path | str:
    """Copy a checkpoint of a run to the run's second place; old ones there go as in the first.

    Args:
        source: ``RUN_DIR/checkpoints/step-N``.
        place: The second place, a folder or a URL; it is made where it is missing.
        keep_last: As in `mds_ckpt.commit.prune`; 0 keeps all.
        keep_every: Likewise.
        identity: File of the age identity that opens encrypted backups; of a URL only.

    Returns:
        The copy, or what a message calls it.

    Raises:
        OSError: If it cannot be written; the checkpoints that are there are untouched.
        ValueError: If the copy is not the original.
    """
    if is_url(str(place)):
        return _back_up_to_url(
            source, str(place), keep_last=keep_last, keep_every=keep_every, identity=identity
        )
    place = Path(place)
    root = place / "checkpoints"
    commit.make_folders(root)
    with commit.lock(root):
        copy = copy_checkpoint(source, root)
        if keep_last:
            commit.prune(root, keep_last=keep_last, keep_every=keep_every)
    _copy_config(source.parent.parent / _CONFIG, place / _CONFIG)
    return copy


def _back_up_to_url(
    source: Path, url: str, *, keep_last: int, keep_every: int | None, identity: str | None
) -> str:
    key = _key(identity)
    backups.back_up(source, url, key=key)
    if keep_last:
        backups.prune_backups(url, keep=newest_steps(keep_last, keep_every=keep_every), key=key)
    return f"{url} ({source.name})"


def backed_up_steps(url: str) -> list[int]:
    """The steps that are backed up at a URL, the newest last."""
    return sorted(
        {int(found[1]) for name in backups.backup_names(url) if (found := _STEP.fullmatch(name))}
    )


def bring_back(url: str, step: int, folder: Path, *, identity: str | None) -> Path:
    """Restore a backed-up checkpoint below a folder; one that is whole there is taken as it is."""
    target = folder / f"step-{step}"
    commit.make_folders(folder)
    if target.exists() and not _is_whole(target):
        shutil.rmtree(target)
    if not target.exists():
        backups.restore(url, target, name=target.name, key=_key(identity))
    return target


def _key(identity: str | None) -> KeySource | None:
    return None if identity is None else KeySource(identity=identity)


def copy_checkpoint(
    source: Path, root: Path, *, operations: commit.FileOperations = commit.REAL
) -> Path:
    """Copy a checkpoint into another folder of checkpoints. Hold `mds_ckpt.commit.lock` of it.

    Args:
        source: A whole checkpoint.
        root: The other folder.
        operations: The disk.
    """
    files = files_of(source)[1]
    manifest = files.pop(MANIFEST_NAME)
    target = root / source.name
    if _is_whole(target, manifest=manifest):
        return target
    step = int(source.name.removeprefix("step-"))
    partial = commit.stage(root, step, operations=operations)
    try:
        _copy_files(source, partial, files, operations=operations)
        last = {MANIFEST_NAME: _read_manifest(source, manifest)}
        return commit.publish_files(
            partial, last, step=step, root=root, existing="replace", operations=operations
        )
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _read_manifest(source: Path, record: FileRecord) -> bytes:
    """The manifest, or of an encrypted checkpoint the envelope, as it was when it was looked at."""
    data = (source / MANIFEST_NAME).read_bytes()
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise ValueError(
            f"{source / MANIFEST_NAME}: it was changed while it was copied; try again."
        )
    return data


def _copy_files(
    source: Path,
    partial: Path,
    files: Mapping[str, FileRecord],
    *,
    operations: commit.FileOperations,
) -> None:
    for name, record in files.items():
        copy = partial / name
        with (source / name).open("rb") as given, operations.create(copy) as file:
            while block := given.read(_BLOCK):
                operations.write(file, memoryview(block))
            operations.sync(file)
        with copy.open("rb") as written:
            found = hashlib.file_digest(written, "sha256").hexdigest()
        if found != record.sha256:
            raise ValueError(
                f"{copy}: the copy of {source / name} has the digest {found[:12]}... where the "
                f"manifest says {record.sha256[:12]}...; one of the two disks, or the way between "
                f"them, is faulty."
            )


def _is_whole(folder: Path, *, manifest: FileRecord | None = None) -> bool:
    """Whether a checkpoint is there and undamaged; with a manifest, whether it is that one."""
    try:
        commit.check_files(folder, digests=True)
        return manifest is None or files_of(folder)[1][MANIFEST_NAME] == manifest
    except (CheckpointError, OSError):
        return False


def _copy_config(source: Path, target: Path) -> None:
    if not source.is_file():  # a run that was started from Python has none
        return
    commit.replace_file(target, source.read_bytes())
