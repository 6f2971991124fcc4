"""Let a writer go on where a killed one was: checkpoints in the folder of an unfinished store.

A checkpoint is ``resume.json`` in the partial folder, replaced by one rename after everything it
counts is on the disk. What the folder holds beyond it is cut off when the next writer takes over.
"""

import base64
import binascii
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mds_data.errors import ManifestError, StoreError
from mds_data.store.array_writer import ArrayState
from mds_data.store.commit import (
    RESUME_NAME,
    FileOperations,
    PartialFolder,
    partial_folders,
    put_file,
)
from mds_data.store.folder import is_store, read_manifest, read_plain_file
from mds_data.store.records import FileRecord, Manifest
from mds_data.store.strict_json import Members, parse_json

__all__ = [
    "Checkpoint",
    "find_checkpoint",
    "finished_folder",
    "give_finished_name",
    "trim",
    "write_checkpoint",
]

_LIMIT = 2**28
_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a writer had on the disk, and what its owner wants to know again."""

    job: Mapping[str, Any]
    """What the owner was asked to do; another job must not go on from here."""
    state: Mapping[str, Any]
    """How far the owner was."""
    tokens: int
    arrays: Mapping[str, ArrayState]


def write_checkpoint(partial: PartialFolder, checkpoint: Checkpoint) -> None:
    """Put a checkpoint in force; the arrays it counts were synced by their `save`."""
    partial.sync_folders()
    fresh = partial.path / f"{RESUME_NAME}.new"
    if fresh.exists():
        partial.operations.remove(fresh)
    put_file(fresh, _to_json(checkpoint), operations=partial.operations)
    partial.operations.sync_folder(partial.path)
    partial.operations.rename(fresh, partial.path / RESUME_NAME)
    partial.operations.sync_folder(partial.path)
    partial.operations.sync_folder(partial.path.parent)


def find_checkpoint(target: Path) -> tuple[Path, Checkpoint] | None:
    """The folder and the checkpoint that a killed writer of ``target`` left, if any.

    Raises:
        ManifestError: There is one, and it is damaged.
    """
    for folder in partial_folders(target):
        if os.path.lexists(folder / RESUME_NAME):
            path = folder / RESUME_NAME
            return folder, _from_json(read_plain_file(path, limit=_LIMIT), name=str(path))
    return None


def finished_folder(target: Path) -> tuple[Path, Manifest] | None:
    """The folder of a store that is whole, and whose writer died before it gave it its name."""
    for folder in partial_folders(target):
        if is_store(folder) and not os.path.lexists(folder / RESUME_NAME):
            return folder, read_manifest(folder)[0]
    return None


def give_finished_name(
    target: Path, folder: Path, *, operations: FileOperations | None = None
) -> None:
    """Do the last step for a writer that died before it; the caller holds the store's lock."""
    PartialFolder(target, operations=operations or FileOperations(), path=folder).give_name()


def trim(folder: Path, checkpoint: Checkpoint, *, operations: FileOperations) -> None:
    """Remove files that were begun after a checkpoint.

    Raises:
        StoreError: A file that it counts is missing or has another size.
    """
    records = {
        name: each for array in checkpoint.arrays.values() for name, each in array.files.items()
    }
    begun = {
        f"{name}/c/{array.shards}" for name, array in checkpoint.arrays.items() if array.chunk_sizes
    }
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.is_file() and relative not in records | dict.fromkeys(begun) | {RESUME_NAME: None}:
            operations.remove(path)
    for relative, record in records.items():
        path = folder / relative
        if not path.is_file() or path.stat().st_size != record.size:
            raise StoreError(
                f"{path}: is not what the interrupted run wrote; start anew by --overwrite"
            )


def _to_json(checkpoint: Checkpoint) -> bytes:
    arrays = {}
    for name, array in checkpoint.arrays.items():
        members = asdict(array)
        members["waiting"] = base64.b64encode(array.waiting).decode()
        arrays[name] = members
    members = {
        "version": _VERSION,
        "job": checkpoint.job,
        "state": checkpoint.state,
        "tokens": checkpoint.tokens,
        "arrays": arrays,
    }
    return json.dumps(members).encode()


def _from_json(data: bytes, *, name: str) -> Checkpoint:
    members = Members(parse_json(data, name=name), name=name)
    if members.raw("version") != _VERSION:
        members.fail("version", "is of another mds-data; start anew by --overwrite")
    arrays = members.child("arrays")
    return Checkpoint(
        job=_object(members, "job"),
        state=_object(members, "state"),
        tokens=members.integer("tokens"),
        arrays={key: _array(arrays.child(key), name=name) for key in _object(members, "arrays")},
    )


def _object(members: Members, member: str) -> dict[str, Any]:
    value = members.raw(member)
    if not isinstance(value, dict):
        members.fail(member, "must be an object")
    return value


def _array(members: Members, *, name: str) -> ArrayState:
    sizes = members.raw("chunk_sizes")
    if not isinstance(sizes, list) or any(type(size) is not int or size < 1 for size in sizes):
        members.fail("chunk_sizes", "must be a list of sizes")
    files = members.child("files")
    try:
        waiting = base64.b64decode(str(members.raw("waiting")), validate=True)
    except binascii.Error as error:
        raise ManifestError(f"{name}: waiting elements can't be decoded ({error})") from None
    records = {}
    for path in _object(members, "files"):
        record = files.child(path)
        records[path] = FileRecord(size=record.integer("size"), sha256=record.digest("sha256"))
    return ArrayState(
        length=members.integer("length"),
        shards=members.integer("shards"),
        files=records,
        chunk_sizes=sizes,
        waiting=waiting,
        attributes=_object(members, "attributes"),
    )
