"""What a power loss may leave of a folder while a program changes it.

A disk forgets what it was not asked to keep: bytes that no `fsync` of their file followed, names
that no `fsync` of their folder followed. Each name may be kept or lost by itself, in any order; of
a file's unsynced bytes come all, none, zeros, or the first half. A rename is kept or lost whole.
File systems mostly do better; nothing obliges them to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recorded_calls import Operation

__all__ = ["Disk", "Tree", "fingerprint", "materialise", "mutants", "states_after", "tree_of"]

Tree = dict[str, Any]
"""Of names: bytes, a further tree, or the path that a symbolic link leads to."""


@dataclass(eq=False)
class _File:
    content: bytes = b""
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes at an offset since the last sync; None: the file ends there."""

    def write(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        self.content = _written(self.content, offset, data)

    def sync(self) -> None:
        self.durable = self.content
        self.pending.clear()

    @property
    def zeros(self) -> bytes:
        """The new size without the new bytes."""
        size = len(self.content)
        return self.durable[:size].ljust(size, b"\0")

    @property
    def torn(self) -> bytes:
        """The first half of what was not synced."""
        left = sum(len(data or b"") for _, data in self.pending) // 2
        content = self.durable
        for offset, data in self.pending:
            part = data if data is None else data[:left]
            left -= len(part or b"")
            content = _written(content, offset, part)
        return content


def _written(content: bytes, offset: int, data: bytes | None) -> bytes:
    if data is None:
        return content[:offset].ljust(offset, b"\0")
    if not data:
        return content
    return content[:offset].ljust(offset, b"\0") + data + content[offset + len(data) :]


@dataclass(eq=False)
class _Folder:
    entries: dict[str, Any] = field(default_factory=dict)
    durable: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Change:
    """Names that come, go or move together."""

    edits: tuple[tuple[_Folder, str, Any], ...]
    """A folder, a name, and what it now is; None: nothing."""

    def apply(self, entries: Callable[[_Folder], dict[str, Any]]) -> bool:
        """Make the edits; whether a disk can be in that state."""
        for folder, name, node in self.edits:
            if node is None:
                if entries(folder).pop(name, None) is None:
                    return False
            elif isinstance(node, _Folder) and name in entries(folder):
                return False
            else:
                entries(folder)[name] = node
        return True


class Disk:
    """A folder with its history since all of it was durable.

    Args:
        folder: What it was at first.
        at: Where the program saw it, if ``folder`` is a copy.
    """

    def __init__(self, folder: Path, *, at: Path | None = None) -> None:
        self._base = at or folder
        self._root = _load(folder)
        self._pending: list[_Change] = []

    def do(self, operation: Operation) -> None:
        """Let it happen; what can't happen (a mutant before it has not) does not."""
        try:
            getattr(self, f"_{operation.kind}")(operation)
        except (KeyError, AttributeError):
            return

    def tree(self) -> Tree:
        """What a program sees now."""
        return _seen(self._root, lambda folder: folder.entries, lambda file: file.content)

    def harshest(self) -> Iterator[Tree]:
        """What may be found if nothing is kept that need not be, and if only names are."""
        for kept in (frozenset[int](), frozenset(range(len(self._pending)))):
            yield from self._state(kept, lambda file: file.durable)

    def states(self) -> Iterator[Tree]:
        """What may be found if the power goes now."""
        count = len(self._pending)
        everything = frozenset(range(count))
        files = self._unsynced()
        whole: Callable[[_File], bytes] = lambda file: file.content  # noqa: E731
        kept_data = [
            whole,
            lambda file: file.durable,
            lambda file: file.zeros,
            lambda file: file.torn,
        ]
        kept_data += [_without(file) for file in files]
        for keep in kept_data:
            yield from self._state(everything, keep)
        single = [frozenset({number}) for number in range(count)]
        for kept in dict.fromkeys([frozenset(), *single, *(everything - each for each in single)]):
            yield from self._state(kept, whole)
            if files:
                yield from self._state(kept, lambda file: file.durable)

    def _unsynced(self) -> list[_File]:
        found: list[_File] = []

        def visit(node: Any) -> None:
            for child in node.entries.values():
                if isinstance(child, _Folder):
                    visit(child)
                elif isinstance(child, _File) and child.pending and child not in found:
                    found.append(child)

        visit(self._root)
        return found

    def _state(self, kept: frozenset[int], keep: Callable[[_File], bytes]) -> Iterator[Tree]:
        overlay: dict[int, dict[str, Any]] = {}

        def entries(folder: _Folder) -> dict[str, Any]:
            return overlay.setdefault(id(folder), dict(folder.durable))

        for number, change in enumerate(self._pending):
            if number in kept and not change.apply(entries):
                return
        yield _seen(self._root, lambda folder: overlay.get(id(folder), folder.durable), keep)

    def _find(self, path: Path) -> Any:
        node: Any = self._root
        for part in path.relative_to(self._base).parts:
            node = node.entries[part]
        return node

    def _change(self, *edits: tuple[Path, Any]) -> None:
        change = _Change(tuple((self._find(path.parent), path.name, node) for path, node in edits))
        for folder, name, _ in change.edits:
            folder.entries.pop(name, None)
        for folder, name, node in change.edits:
            if node is not None:
                folder.entries[name] = node
        self._pending.append(change)

    def _create(self, operation: Operation) -> None:
        if operation.path.name not in self._find(operation.path.parent).entries:
            self._change((operation.path, _File()))

    def _folder(self, operation: Operation) -> None:
        self._change((operation.path, _Folder()))

    def _symlink(self, operation: Operation) -> None:
        self._change((operation.path, operation.other))

    def _write(self, operation: Operation) -> None:
        file, data = self._find(operation.path), operation.data
        if operation.source is not None:
            inside = operation.source.is_relative_to(self._base)
            whole = (
                self._find(operation.source).content if inside else operation.source.read_bytes()
            )
            data = whole[operation.offset_in : operation.offset_in + operation.size]
        file.write(len(file.content) if operation.offset < 0 else operation.offset, data)

    def _truncate(self, operation: Operation) -> None:
        file = self._find(operation.path)
        if len(file.content) != operation.size:
            file.write(operation.size, None)

    def _grow(self, operation: Operation) -> None:
        file = self._find(operation.path)
        if len(file.content) < operation.size:
            file.write(operation.size, None)

    def _rename(self, operation: Operation) -> None:
        assert operation.other is not None
        node = self._find(operation.path)
        self._change((operation.path, None), (operation.other, node))

    def _link(self, operation: Operation) -> None:
        assert operation.other is not None
        self._change((operation.other, self._find(operation.path)))

    def _remove(self, operation: Operation) -> None:
        self._find(operation.path)
        self._change((operation.path, None))

    def _sync(self, operation: Operation) -> None:
        node = self._find(operation.path)
        if isinstance(node, _File):
            node.sync()
            return
        left = []
        for change in self._pending:
            if any(folder is node for folder, _, _ in change.edits):
                change.apply(lambda folder: folder.durable)
            else:
                left.append(change)
        self._pending = left


def _without(lost: _File) -> Callable[[_File], bytes]:
    return lambda file: file.durable if file is lost else file.content


def _load(path: Path) -> _Folder:
    entries: dict[str, Any] = {}
    for entry in path.iterdir():
        if entry.is_symlink():
            entries[entry.name] = entry.readlink()
        elif entry.is_dir():
            entries[entry.name] = _load(entry)
        else:
            content = entry.read_bytes()
            entries[entry.name] = _File(content, content)
    return _Folder(entries, dict(entries))


def _seen(
    folder: _Folder,
    entries: Callable[[_Folder], dict[str, Any]],
    keep: Callable[[_File], bytes],
) -> Tree:
    found: Tree = {}
    for name, node in entries(folder).items():
        if isinstance(node, _Folder):
            found[name] = _seen(node, entries, keep)
        else:
            found[name] = keep(node) if isinstance(node, _File) else node
    return found


def tree_of(folder: Path) -> Tree:
    """A folder as it is."""
    return Disk(folder).tree()


def fingerprint(tree: Tree) -> int:
    """The same for equal trees; quick, since Python keeps the hash of what it has hashed."""
    return hash(_frozen(tree))


def _frozen(tree: Tree) -> frozenset[tuple[str, Any]]:
    return frozenset(
        (name, _frozen(node) if isinstance(node, dict) else node) for name, node in tree.items()
    )


def materialise(tree: Tree, folder: Path) -> Path:
    """Write a tree into a new folder."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, dict):
            materialise(node, folder / name)
        elif isinstance(node, bytes):
            (folder / name).write_bytes(node)
        else:
            (folder / name).symlink_to(node)
    return folder


def states_after(
    before: Path,
    operations: Sequence[Operation],
    *,
    at: Path,
    since: int = 0,
    harshest: bool = False,
) -> Iterator[tuple[bool, Tree]]:
    """Each different state that a power loss may leave, and whether the program had ended.

    Args:
        before: A copy of the folder as it was.
        operations: What the program did.
        at: Where it did it.
        since: Leaves out the states before this many operations.
        harshest: The few states of each moment that are most likely to be bad.
    """
    disk = Disk(before, at=at)
    seen: set[tuple[bool, int]] = set()
    for done in range(len(operations) + 1):
        if done:
            disk.do(operations[done - 1])
        finished = done == len(operations)
        if done < since:
            continue
        for tree in disk.harshest() if harshest else disk.states():
            key = (finished, fingerprint(tree))
            if key not in seen:
                seen.add(key)
                yield finished, tree


def mutants(operations: Sequence[Operation]) -> Iterator[tuple[int, list[Operation]]]:
    """The operations without one sync or one rename, and the number of what was left out."""
    for number, operation in enumerate(operations):
        if operation.kind in ("sync", "rename"):
            yield number, [*operations[:number], *operations[number + 1 :]]
