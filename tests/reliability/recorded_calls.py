"""What any program does to a folder, from the trace of its system calls.

`strace` writes each call with every byte; here it becomes a list of operations on names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["OPTIONS", "Operation", "operations_in"]

_CALLS = (
    "openat,write,pwrite64,writev,pwritev,lseek,ftruncate,fallocate,fsync,fdatasync,sendfile,"
    "copy_file_range,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,"
    "mkdir,mkdirat,rmdir"
)
OPTIONS: Sequence[str] = ("-y", "-xx", "-s", "16777216", "-e", f"trace={_CALLS}")
"""What strace must be told besides ``-f`` and ``-o FILE``."""

_LINE = re.compile(r"(?:(\d+) +)?(\w+)\((.*)\) += (-?\d+)", flags=re.DOTALL)
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_OPENED = re.compile(r"(\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
_NUMBER = re.compile(r"(?:^|, )(\d+)(?=, |$)")


@dataclass(frozen=True, slots=True)
class Operation:
    """One change, or one wish that changes be kept."""

    kind: str
    """create, write, truncate, sync, rename, link, symlink, remove or folder."""
    path: Path
    other: Path | None = None
    """The new name, or where a symbolic link leads."""
    offset: int = 0
    data: bytes = b""
    """Of a write."""
    source: Path | None = None
    """The file whose bytes from ``offset_in`` on are written, where the system copied them."""
    offset_in: int = 0
    size: int = 0
    """After a truncation, or of a copy."""


def operations_in(log: str, *, folder: Path) -> list[Operation]:
    """The operations on ``folder`` and what lies in it, in the order in which they ended."""
    reader = _Reader(folder)
    return [found for line in _whole_lines(log) for found in reader.read(line)]


def _whole_lines(log: str) -> Iterator[str]:
    """Lines of the log; a call that another thread's cut in two is one line again."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        thread = line.partition(" ")[0]
        if line.endswith("<unfinished ...>"):
            begun[thread] = line.removesuffix("<unfinished ...>").rstrip()
        elif (resumed := re.search(r"<\.\.\. \w+ resumed>", line)) is not None:
            yield begun.pop(thread, "") + line[resumed.end() :].lstrip(" ")
        else:
            yield line


def _plain(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


class _Reader:
    """Keeps the position of every open file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[tuple[str, Path], int | None] = {}
        """By descriptor and file; None where all is appended."""
        self._sizes: dict[Path, int] = {}

    def read(self, line: str) -> Iterator[Operation]:
        found = _LINE.match(line)
        if found is None or int(found[4]) < 0:
            return
        name, arguments, result = found[2], found[3], int(found[4])
        opened = [
            (number, Path(os.fsdecode(_plain(path)))) for number, path in _OPENED.findall(arguments)
        ]
        texts = [_plain(text) for text in _TEXT.findall(arguments)]
        if name in ("write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range"):
            yield from self._write(name, arguments, opened, b"".join(texts), result)
        elif name in ("lseek", "ftruncate", "fallocate", "fsync", "fdatasync"):
            yield from self._on_file(name, arguments, opened[0], result)
        elif name == "openat":
            yield from self._open(arguments, self._named(opened, texts)[0], str(result))
        else:
            yield from self._on_names(name, arguments, self._named(opened, texts))

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(self._folder)

    def _named(self, opened: list[tuple[str, Path]], texts: list[bytes]) -> list[Path]:
        """The paths that a call names, each relative to the folder that stands before it."""
        bases = [path for _, path in opened] or [Path.cwd()]
        bases += [bases[-1]] * len(texts)
        paths = [Path(os.fsdecode(text)) for text in texts]
        return [
            Path(os.path.normpath(base / path)) for base, path in zip(bases, paths, strict=False)
        ]

    def _open(self, arguments: str, path: Path, descriptor: str) -> Iterator[Operation]:
        if not self._is_ours(path) or "O_RDONLY" in arguments:
            return
        self._positions[descriptor, path] = None if "O_APPEND" in arguments else 0
        if "O_CREAT" in arguments:
            yield Operation("create", path)
        if "O_TRUNC" in arguments:
            yield Operation("truncate", path)

    def _write(
        self, name: str, arguments: str, opened: list[tuple[str, Path]], data: bytes, done: int
    ) -> Iterator[Operation]:
        files = opened[::-1] if name == "copy_file_range" else opened
        if not files or not self._is_ours(files[0][1]) or not done:
            return
        target = files[0]
        if name in ("pwrite64", "pwritev"):
            yield Operation("write", target[1], offset=_last_number(arguments), data=data[:done])
            return
        start = self._positions.get(target, 0)
        if start is not None:
            self._positions[target] = start + done
        offset = -1 if start is None else start
        if len(files) == 1:
            yield Operation("write", target[1], offset=offset, data=data[:done])
            return
        before = re.search(r"\[(\d+)\]", arguments)
        begin = int(before[1]) if before else self._positions.get(files[1], 0) or 0
        self._positions[files[1]] = begin + done
        yield Operation(
            "write", target[1], offset=offset, source=files[1][1], offset_in=begin, size=done
        )

    def _on_file(
        self, name: str, arguments: str, opened: tuple[str, Path], result: int
    ) -> Iterator[Operation]:
        path = opened[1]
        if not self._is_ours(path):
            return
        if name == "lseek":
            if self._positions.get(opened, 0) is not None:
                self._positions[opened] = result
        elif name == "ftruncate":
            yield Operation("truncate", path, size=_last_number(arguments))
        elif name == "fallocate":
            yield Operation("grow", path, size=sum(map(int, _NUMBER.findall(arguments)[-2:])))
        else:
            yield Operation("sync", path)

    def _on_names(self, name: str, arguments: str, paths: list[Path]) -> Iterator[Operation]:
        kinds = {"rename": "rename", "link": "link", "mkdir": "folder", "rmdir": "remove"}
        kinds |= {"unlink": "remove", "symlink": "symlink"}
        kind = next(kinds[key] for key in kinds if name.startswith(key))
        if kind == "symlink":
            target = _plain(_TEXT.findall(arguments)[0])
            yield Operation("symlink", paths[1], other=Path(os.fsdecode(target)))
        elif any(map(self._is_ours, paths)):
            yield Operation(kind, paths[0], other=paths[1] if len(paths) > 1 else None)


def _last_number(arguments: str) -> int:
    return int(_NUMBER.findall(arguments)[-1])
