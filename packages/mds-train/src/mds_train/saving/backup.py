"""The second place of a run's checkpoints: copied after the commit, compared, then committed there.

The folder has the form of a run's: ``config.toml`` and ``checkpoints/``, so `mds-train resume` and
`checkpoint.load` take it as they take the run itself.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from mds_ckpt import CheckpointError, commit
from mds_ckpt.manifest import CheckpointManifest

__all__ = ["back_up", "copy_checkpoint"]

_BLOCK = 16 << 20
_CONFIG = "config.toml"


def back_up(source: Path, place: Path, *, keep_last: int, keep_every: int | None) -> Path:
    """Copy a checkpoint of a run to the run's second place; old ones there go as in the first.

    Args:
        source: ``RUN_DIR/checkpoints/step-N``.
        place: The second place; it is made where it is missing.
        keep_last: As in `mds_ckpt.commit.prune`; 0 keeps all.
        keep_every: Likewise.

    Returns:
        The copy.

    Raises:
        OSError: If it cannot be written; the checkpoints that are there are untouched.
        ValueError: If the copy is not the original.
    """
    root = place / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    with commit.lock(root):
        copy = copy_checkpoint(source, root)
        if keep_last:
            commit.prune(root, keep_last=keep_last, keep_every=keep_every)
    _copy_config(source.parent.parent / _CONFIG, place / _CONFIG)
    return copy


def copy_checkpoint(
    source: Path, root: Path, *, operations: commit.FileOperations = commit.REAL
) -> Path:
    """Copy a checkpoint into another folder of checkpoints. Hold `mds_ckpt.commit.lock` of it.

    Args:
        source: A whole checkpoint.
        root: The other folder.
        operations: The disk.
    """
    manifest = commit.read_manifest(source)
    target = root / source.name
    if _is_whole(target, uuid=manifest.uuid):
        return target
    partial = commit.stage(root, manifest.step, operations=operations)
    try:
        _copy_files(source, partial, manifest, operations=operations)
        return commit.publish(
            partial, manifest, root=root, existing="replace", operations=operations
        )
    except (OSError, ValueError):
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_files(
    source: Path, partial: Path, manifest: CheckpointManifest, *, operations: commit.FileOperations
) -> None:
    for name, record in manifest.files.items():
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


def _is_whole(folder: Path, *, uuid: str) -> bool:
    try:
        return commit.check_folder(folder, digests=True).uuid == uuid
    except (CheckpointError, OSError):
        return False


def _copy_config(source: Path, target: Path) -> None:
    if not source.is_file():  # a run that was started from Python has none
        return
    partial = target.with_name(target.name + ".partial")
    try:
        partial.write_bytes(source.read_bytes())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
