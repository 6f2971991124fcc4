"""The difficulty index: one file a measure, and a description that ties them to a store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DataError
from mds_data.preprocess.task import Task, parse_task, task_places
from mds_data.store.records import package_version
from mds_data.store.token_store import TokenStore

__all__ = [
    "DifficultyIndex",
    "check_free",
    "is_index",
    "join_parts",
    "open_index",
    "write_index",
]

_DESCRIPTION = "difficulty.json"
_FORMAT = "mds-difficulty/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class DifficultyIndex:
    """The measures of every sample or document of a store."""

    path: Path
    unit: str
    """``sample`` or ``document``."""
    arguments: Mapping[str, Any]
    """What made the rows: seq_length, seed, split, order, num_samples."""
    store_uuid: str
    store_revision: int
    metrics: Mapping[str, Mapping[str, Any]]
    """File, digest and range of each measure."""
    task: str | None = None
    """``3/8`` if it is what one task of a job array measured."""

    def values(self, name: str) -> NDArray[np.float64]:
        """[rows] one measure.

        Raises:
            KeyError: It was not measured.
            DataError: Its file is missing, cut or changed.
        """
        if name not in self.metrics:
            raise KeyError(f"{self.path}: has no measure {name!r}; it has {list(self.metrics)}")
        record = self.metrics[name]
        file = self.path / record["file"]
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            raise DataError(f"{file}: is missing; measure anew by mds-data analyze") from None
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise DataError(f"{file}: was cut or changed; measure anew by mds-data analyze")
        return np.frombuffer(data, "<f8")

    def check(self, store: TokenStore, **arguments: object) -> None:
        """Refuse rows that are not the measured ones.

        Raises:
            DataError: The store changed since, or its rows are cut in another way.
        """
        manifest = store.manifest
        if (manifest.uuid, manifest.revision) != (self.store_uuid, self.store_revision):
            raise DataError(
                f"{self.path}: was measured on another store or revision than {store.path}; "
                f"measure anew by mds-data analyze"
            )
        for name, value in arguments.items():
            kept = self.arguments.get(name)
            if _plain(value) != kept:
                raise DataError(
                    f"{self.path}: was measured with {name} {kept!r}, not {value!r}; measure anew"
                )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def write_index(
    path: str | os.PathLike[str],
    values: Mapping[str, NDArray[np.float64]],
    *,
    store: TokenStore,
    unit: str,
    arguments: Mapping[str, Any],
    task: Task | None = None,
    overwrite: bool = False,
) -> DifficultyIndex:
    """Write an index folder, which appears whole.

    Args:
        path: The folder.
        values: [rows] each measure.
        store: What was measured.
        unit: ``sample`` or ``document``.
        arguments: What made the rows.
        task: Which part of the rows these are; the parts of a job array are joined later.
        overwrite: Replace an index that is there.

    Raises:
        DataError: ``path`` exists.
    """
    manifest = store.manifest
    facts = {
        "store": {"uuid": manifest.uuid, "revision": manifest.revision},
        "unit": unit,
        "arguments": {name: _plain(value) for name, value in arguments.items()},
    }
    _write_folder(Path(path), values, facts, task=task, overwrite=overwrite)
    return _read_index(Path(path))


def _write_folder(
    root: Path,
    values: Mapping[str, NDArray[np.float64]],
    facts: Mapping[str, Any],
    *,
    task: Task | None,
    overwrite: bool,
) -> None:
    check_free(root, overwrite=overwrite)
    partial = root.with_name(f"{root.name}.partial-{os.urandom(8).hex()}")
    partial.mkdir(parents=True)
    try:
        description = _write(partial, values, facts)
        if task is not None:
            description["task"] = str(task)
        _sync_file(partial / _DESCRIPTION, json.dumps(description, indent=1).encode())
        if root.exists():
            shutil.rmtree(root)
        partial.replace(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_free(root: Path, *, overwrite: bool) -> None:
    """Refuse a name that is taken.

    Raises:
        DataError: There is something that must not be replaced.
    """
    if not root.exists():
        return
    if not overwrite:
        raise DataError(f"{root} exists. Choose another output, or replace it by --overwrite.")
    if not (root / _DESCRIPTION).is_file():
        raise DataError(
            f"{root} exists and is no difficulty index, so --overwrite leaves it alone."
        )


def _write(
    folder: Path,
    values: Mapping[str, NDArray[np.float64]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    metrics = {}
    for name, row in values.items():
        file = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        data = np.ascontiguousarray(row, "<f8").tobytes()
        _sync_file(folder / f"{file}.f64", data)
        metrics[name] = {
            "file": f"{file}.f64",
            "sha256": hashlib.sha256(data).hexdigest(),
            "count": len(row),
            "minimum": float(row.min()) if len(row) else None,
            "maximum": float(row.max()) if len(row) else None,
            "mean": float(row.mean()) if len(row) else None,
        }
    return {
        "format": _FORMAT,
        "producer": {"name": "mds-data", "version": package_version()},
        **facts,
        "metrics": metrics,
    }


def _sync_file(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def open_index(path: str | os.PathLike[str]) -> DifficultyIndex:
    """Open an index folder.

    Raises:
        FileNotFoundError: There is nothing at ``path``.
        DataError: The folder is no index, one of another version, or one task's part.
    """
    index = _read_index(Path(path))
    if index.task is not None:
        raise DataError(
            f"{path}: is what task {index.task} measured; join the parts of all by mds-data merge"
        )
    return index


def is_index(path: Path) -> bool:
    """Whether a folder looks like a difficulty index, or a part of one."""
    return (path / _DESCRIPTION).is_file()


def join_parts(parts: Sequence[Path], path: Path) -> DifficultyIndex:
    """Write the index of all rows from what the tasks of a job array have measured.

    Args:
        parts: The folders of all tasks.
        path: The new index.

    Raises:
        DataError: A task is missing, or they measured other rows, or one is a whole index.
    """
    read = [_read_index(part) for part in parts]
    tasks = []
    for index in read:
        if index.task is None:
            raise DataError(f"{index.path}: is a whole index, no part of one; leave it out")
        tasks.append(parse_task(index.task))
    found = [read[place] for place in task_places(tasks, names=parts)]
    first = found[0]
    for index in found:
        if _facts(index) != _facts(first) or list(index.metrics) != list(first.metrics):
            raise DataError(f"{index.path}: measured other rows, or otherwise, than {first.path}")
    values = {
        name: np.concatenate([index.values(name) for index in found]) for name in first.metrics
    }
    _write_folder(path, values, _facts(first), task=None, overwrite=False)
    return _read_index(path)


def _facts(index: DifficultyIndex) -> dict[str, Any]:
    return {
        "store": {"uuid": index.store_uuid, "revision": index.store_revision},
        "unit": index.unit,
        "arguments": dict(index.arguments),
    }


def _read_index(root: Path) -> DifficultyIndex:
    if not root.exists():
        raise FileNotFoundError(f"{root}: there is no such difficulty index; check the path")
    try:
        found = json.loads((root / _DESCRIPTION).read_bytes())
        if found["format"] != _FORMAT:
            raise DataError(f"{root}: is of format {found['format']!r}, not {_FORMAT}")
        return DifficultyIndex(
            path=root,
            unit=found["unit"],
            arguments=found["arguments"],
            store_uuid=found["store"]["uuid"],
            store_revision=found["store"]["revision"],
            metrics=found["metrics"],
            task=found.get("task"),
        )
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError):
        raise DataError(f"{root}: is no difficulty index; write one by mds-data analyze") from None
