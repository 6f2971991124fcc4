"""Disks that fail, are killed, or forget what was not forced to them; for crash tests."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mds_ckpt.files.file_operations import FileOperations


class Killed(BaseException):
    """The process dies here. Not an Exception: nothing may clean up after it."""


@dataclass
class BreakingDisk(FileOperations):
    """Breaks at operation number ``at`` (from 0), after half of a write has happened.

    ``make`` gives the exception of that operation: :class:`Killed`, or :func:`refused`, an OSError
    for a disk that reports failure.
    """

    at: int | None = None
    make: Callable[[int], BaseException] = Killed
    count: int = 0

    def _step(self) -> bool:
        here = self.count == self.at
        self.count += 1
        return here

    def _do(self, name: str, *arguments: Any) -> Any:
        if self._step():
            raise self.make(self.count)
        return getattr(super(), name)(*arguments)

    def write(self, file: BinaryIO, data: memoryview) -> None:
        if self._step():
            super().write(file, data[: len(data) // 2])
            raise self.make(self.count)
        super().write(file, data)

    def write_at(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        if self._step():
            super().write_at(file, data[: len(data) // 2], offset)
            raise self.make(self.count)
        super().write_at(file, data, offset)


def _wrapped(name: str) -> Callable[..., Any]:
    def operation(self: BreakingDisk, *arguments: Any) -> Any:
        return self._do(name, *arguments)

    return operation


for _name in (
    "make_folder",
    "create",
    "sync",
    "sync_path",
    "sync_folder",
    "rename",
    "replace",
    "remove",
    "remove_folder",
):
    setattr(BreakingDisk, _name, _wrapped(_name))


def refused(at: int) -> OSError:
    """Another reason at each operation; a sweep over all of them meets each many times."""
    number = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)[at % 4]
    return OSError(number, os.strerror(number))


class _ShortFile(io.FileIO):
    """Takes a part of what it is given, as a system call may."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[: max(1, len(data) // 3)])


class ShortDisk(FileOperations):
    """Every write ends early."""

    def create(self, path: Path) -> BinaryIO:
        return _ShortFile(path, "xb")


class _LyingFile(io.FileIO):
    """Says that it has written a few bytes more than it has."""

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[7:]) + 7 if len(data) > 7 else super().write(data)


class LyingDisk(FileOperations):
    """Loses the first bytes of every write."""

    def create(self, path: Path) -> BinaryIO:
        return _LyingFile(path, "xb")


# A disk that loses power -------------------------------------------------------------------------


@dataclass
class _File:
    content: bytes = b""
    synced: bytes = b""


@dataclass
class _Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)
    pending: list[tuple[str, Any]] = field(default_factory=list)
    """Changes of entries since the last sync: a name, and what it now is (None: nothing)."""


class RecordingDisk(FileOperations):
    """Does everything for real below ``root``, and records it.

    ``skip`` is the number of one sync or rename that it forgets to do: a mutant.
    """

    def __init__(self, root: Path, *, skip: int | None = None) -> None:
        self.root = root
        self.skip = skip
        self.log: list[tuple[Any, ...]] = []
        self.skippable: list[str] = []
        self._names: dict[int, Path] = {}

    def _skipped(self, what: str) -> bool:
        self.skippable.append(what)
        return len(self.skippable) - 1 == self.skip

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self.log.append(("folder", path))

    def create(self, path: Path) -> BinaryIO:
        file = super().create(path)
        self._names[id(file)] = path
        self.log.append(("create", path))
        return file

    def write(self, file: BinaryIO, data: memoryview) -> None:
        super().write(file, data)
        self.log.append(("write", self._names[id(file)], bytes(data)))

    def write_at(self, file: BinaryIO, data: memoryview, offset: int) -> None:
        super().write_at(file, data, offset)
        self.log.append(("write", self._names[id(file)], bytes(data), offset))

    def sync(self, file: BinaryIO) -> None:
        path = self._names[id(file)]
        if not self._skipped(f"sync {path.name}"):
            self.log.append(("sync", path))

    def sync_path(self, path: Path) -> None:
        if not self._skipped(f"sync {path.name}"):
            self.log.append(("sync", path))

    def sync_folder(self, path: Path) -> None:
        if not self._skipped(f"sync folder {path.name}"):
            self.log.append(("sync folder", path))

    def rename(self, source: Path, target: Path) -> None:
        if not self._skipped(f"rename {source.name}"):
            super().rename(source, target)
            self.log.append(("rename", source, target))

    def replace(self, source: Path, target: Path) -> None:
        if not self._skipped(f"replace {target.name}"):
            super().replace(source, target)
            self.log.append(("rename", source, target))

    def remove(self, path: Path) -> None:
        super().remove(path)
        self.log.append(("remove", path))

    def remove_folder(self, path: Path) -> None:
        super().remove_folder(path)
        self.log.append(("remove", path))


def states_after_power_loss(
    before: Path, disk: RecordingDisk
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every disk that a power loss may leave: after each operation, with what may be forgotten.

    Yields the number of operations done, and a tree of names to bytes or to further trees.
    Of a file that was not synced, all or nothing of what came since may be lost; of a folder,
    all, none, any one, or all but any one of the changes of its entries since its last sync.
    """
    for done in range(len(disk.log), -1, -1):
        root = _load(before)
        for operation in disk.log[:done]:
            _apply(root, disk.root, operation)
        seen = set()
        for keep_data in (False, True):
            for lost in _losses(len(root.pending)):
                for keep_below in (False, True):
                    tree = _tree(root, lost=lost, keep_data=keep_data, keep_below=keep_below)
                    if tree is not None and (key := repr(tree)) not in seen:
                        seen.add(key)
                        yield done, tree


def _losses(count: int) -> list[frozenset[int]]:
    everything = frozenset(range(count))
    single = [frozenset({i}) for i in range(count)]
    return list(
        dict.fromkeys([everything, frozenset(), *single, *(everything - s for s in single)])
    )


def _load(path: Path) -> _Folder:
    entries: dict[str, Any] = {}
    for entry in path.iterdir():
        if entry.is_dir():
            entries[entry.name] = _load(entry)
        else:
            content = entry.read_bytes()
            entries[entry.name] = _File(content, content)
    return _Folder(entries, dict(entries))


def _find(root: _Folder, base: Path, path: Path) -> Any:
    node: Any = root
    for part in path.relative_to(base).parts:
        node = node.entries[part]
    return node


def _set(folder: _Folder, name: str, node: Any) -> None:
    folder.pending.append((name, node))
    if node is None:
        del folder.entries[name]
    else:
        folder.entries[name] = node


def _apply(root: _Folder, base: Path, operation: tuple[Any, ...]) -> None:
    kind, path, *rest = operation
    parent = _find(root, base, path.parent) if path != base else root
    if kind == "folder":
        _set(parent, path.name, _Folder())
    elif kind == "create":
        _set(parent, path.name, _File())
    elif kind == "write":
        file, data = _find(root, base, path), rest[0]
        at = rest[1] if rest[1:] else len(file.content)
        file.content = file.content[:at].ljust(at, b"\0") + data + file.content[at + len(data) :]
    elif kind == "sync":
        file = _find(root, base, path)
        file.synced = file.content
    elif kind == "sync folder":
        folder = _find(root, base, path)
        folder.synced = dict(folder.entries)
        folder.pending.clear()
    elif kind == "rename":
        node = _find(root, base, path)
        # One change of two entries: a rename is kept or lost as a whole.
        parent.pending.append((path.name, ("renamed", rest[0].name, node)))
        del parent.entries[path.name]
        parent.entries[rest[0].name] = node
    elif kind == "remove":
        _set(parent, path.name, None)


def _tree(node: Any, *, lost: frozenset[int], keep_data: bool, keep_below: bool) -> Any:
    """What is found after the power is back; None if no disk can be in this state."""
    if isinstance(node, _File):
        return node.content if keep_data else node.synced
    entries = dict(node.synced)
    for number, (name, change) in enumerate(node.pending):
        if number in lost:
            continue
        if change is None:
            if entries.pop(name, None) is None:
                return None
        elif isinstance(change, tuple):
            _, target, moved = change
            if entries.pop(name, None) is None:
                return None
            if target in entries and isinstance(moved, _Folder):
                return None
            entries[target] = moved
        else:
            entries[name] = change
    below = {
        name: _tree(
            child,
            lost=frozenset() if keep_below else _everything(child),
            keep_data=keep_data,
            keep_below=keep_below,
        )
        for name, child in entries.items()
    }
    return None if any(child is None for child in below.values()) else below


def _everything(node: Any) -> frozenset[int]:
    return frozenset(range(len(node.pending))) if isinstance(node, _Folder) else frozenset()


def materialise(tree: dict[str, Any], folder: Path) -> Path:
    """Write a tree into a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            materialise(content, folder / name)
        else:
            (folder / name).write_bytes(content)
    return folder
