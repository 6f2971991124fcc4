"""List every global that a checkpoint's pickles would import, with a verdict. Runs nothing.

Files are told apart by their bytes, not by their names. A member that can't be followed to its end
is reported as broken, with what was found before and behind the break.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.numpy_archive import elements_start, holds_objects, numpy_archive
from mds_ckpt.files.regular_file import OpenFile, RegularFile
from mds_ckpt.files.zip_directory import Member, locate, read_directory
from mds_ckpt.pickles.globals import judge
from mds_ckpt.pickles.walk import walk

__all__ = ["Finding", "scan_path"]

LARGEST_PICKLE = 64 << 20
MOST_FILES = 200_000
_WINDOW = 8 << 20
_TEXT_STARTS = (b"c", b"(", b"]", b"}", b")", b"i", b"V", b"S", b"U", b"I", b"N", b"K", b"l", b"d")

Verdict = Literal["known", "inert", "dangerous", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A global that a pickle would import, or a place that could not be read."""

    file: str
    """Path below the scanned folder."""
    member: str | None
    """Member of a zip or tar file."""
    name: str
    """``module.name``; empty for a broken place."""
    verdict: Verdict
    reason: str


def scan_path(path: str | Path) -> list[Finding]:
    """What the pickles of a file, or of all files below a folder, would import.

    Args:
        path: A file or a folder. Links are reported, not followed.

    Returns:
        One finding for each file, member and name; ``known`` and ``inert`` names are harmless.

    Raises:
        RejectedError: There is nothing at ``path``.
    """
    path = Path(path)
    if not path.exists():
        raise RejectedError(path, "there is no such file or folder", remedy="check the path")
    if not path.is_dir():
        return list(_scan_file(path, path.name))
    findings: list[Finding] = []
    for count, file in enumerate(_files(path)):
        if count >= MOST_FILES:
            reason = f"more than {MOST_FILES} files; the rest was not looked at"
            return [*findings, _broken(".", None, reason)]
        findings.extend(_scan_file(file, file.relative_to(path).as_posix()))
    return findings


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, followlinks=False):
        folders.sort()
        for name in sorted(names):
            yield Path(parent, name)
        for name in folders:
            if Path(parent, name).is_symlink():
                yield Path(parent, name)


def _broken(file: str, member: str | None, reason: str) -> Finding:
    return Finding(file=file, member=member, name="", verdict="broken", reason=reason)


def _scan_file(path: Path, label: str) -> Iterator[Finding]:
    mode = path.lstat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        yield _broken(label, None, "it is not a regular file")
        return
    try:
        with RegularFile(path, cache_links=True).open() as file:
            yield from _scan_open(file, label)
    except RejectedError as error:
        yield _broken(label, error.tensor, error.reason)


def _scan_open(file: OpenFile, label: str) -> Iterator[Finding]:
    head = bytes(file.read(0, min(file.size, 512)))
    if head.startswith(b"PK\x03\x04"):
        yield from _scan_zip(file, label)
    elif head.startswith(b"\x93NUMPY"):
        yield from _scan_numpy(file, label, head)
    elif head[257:262] == b"ustar":
        yield from _scan_tar(file, label)
    elif head[:1] == b"\x80" and not _is_safetensors(head):
        data = bytes(file.read(0, min(file.size, LARGEST_PICKLE)))
        yield from _scan_pickles(data, label, None)
    else:
        data = bytes(file.read(0, min(file.size, LARGEST_PICKLE)))
        yield from _scan_text_pickle(data, label, None)
        yield from _sweep(file, label)


def _is_safetensors(head: bytes) -> bool:
    """A header length in 8 bytes, then JSON; a pickle has no 0x00 opcode."""
    return head[5:8] == b"\0\0\0" and head[8:9] == b"{"


def _scan_text_pickle(data: bytes, label: str, member: str | None) -> Iterator[Finding]:
    """Protocols 0 and 1 have no mark of their own: a file is one if it reads as one, or names."""
    if data[:1] not in _TEXT_STARTS or not data:
        return
    result = walk(data)
    names = {
        name: called
        for name, called in result.named.items()
        if all(part.isidentifier() for part in f"{name.module}.{name.name}".split("."))
    }
    for name, called in names.items():
        yield _judged(name.module, name.name, label, member, called=called)
    if names and result.fault is not None:
        yield _broken(label, member, f"the pickle is broken: {result.fault}")


def _scan_zip(file: OpenFile, label: str) -> Iterator[Finding]:
    try:
        members = read_directory(file)
    except RejectedError as error:
        arrays = numpy_archive(file, most=LARGEST_PICKLE)
        if arrays:
            for name, data in arrays.items():
                yield from _numpy_findings(data, label, name)
            return
        inside = list(_sweep(file, label))
        # DCP's data files are torch files one after the other, so the last directory fits none.
        if not (label.endswith(".distcp") and inside):
            yield _broken(label, error.tensor, error.reason)
        yield from inside
        return
    for member in members.values():
        yield from _scan_member(file, label, member)


def _scan_member(file: OpenFile, label: str, member: Member) -> Iterator[Finding]:
    is_pickle = member.name.endswith((".pkl", ".pickle"))
    if not is_pickle and "/data/" in member.name:
        return
    try:
        at = locate(file, member)
    except RejectedError as error:
        yield _broken(label, member.name, error.reason)
        return
    data = bytes(file.read(at, min(member.size, LARGEST_PICKLE)))
    if is_pickle or data[:1] == b"\x80":
        if member.crc32 and zlib.crc32(data) != member.crc32:
            yield _broken(label, member.name, "its checksum differs")
        yield from _scan_pickles(data, label, member.name)
    elif data.startswith(b"\x93NUMPY"):
        yield from _numpy_findings(data, label, member.name)


def _scan_numpy(file: OpenFile, label: str, head: bytes) -> Iterator[Finding]:
    yield from _numpy_findings(bytes(file.read(0, min(file.size, LARGEST_PICKLE))), label, None)


def _numpy_findings(data: bytes, label: str, member: str | None) -> Iterator[Finding]:
    """An array of objects is a pickle behind a short header; other arrays import nothing."""
    if holds_objects(data):
        yield from _scan_pickles(data[elements_start(data) :], label, member)


def _scan_tar(file: OpenFile, label: str) -> Iterator[Finding]:
    at = 0
    while at + 512 <= file.size:
        header = bytes(file.read(at, 512))
        if not header[0]:
            return
        try:
            size = int(header[124:136].rstrip(b" \0") or b"0", 8)
        except ValueError:
            size = -1
        if size < 0 or at + 512 + size > file.size:
            yield _broken(label, None, "its tar header is damaged")
            return
        name = header[:100].rstrip(b"\0").decode("utf-8", "replace")
        data = bytes(file.read(at + 512, min(size, LARGEST_PICKLE)))
        if data[:1] == b"\x80":
            yield from _scan_pickles(data, label, name)
        else:
            yield from _scan_text_pickle(data, label, name)
        at += 512 + (size + 511) // 512 * 512


def _sweep(file: OpenFile, label: str) -> Iterator[Finding]:
    """Look for torch files inside another file (DCP writes them one after the other)."""
    at, seen = 0, set[int]()
    while at < file.size:
        window = bytes(file.read(at, min(file.size - at, _WINDOW + 512)))
        found = window.find(b"PK\x03\x04")
        while 0 <= found < _WINDOW:
            if at + found not in seen:
                seen.add(at + found)
                yield from _scan_local(file, label, at + found)
            found = window.find(b"PK\x03\x04", found + 4)
        at += _WINDOW


def _scan_local(file: OpenFile, label: str, at: int) -> Iterator[Finding]:
    """A member that is known only by its local header."""
    header = bytes(file.read(at, min(30, file.size - at)))
    if len(header) < 30:
        return
    name_size = int.from_bytes(header[26:28], "little")
    extra = int.from_bytes(header[28:30], "little")
    start = at + 30 + name_size + extra
    if start >= file.size:
        return
    name = bytes(file.read(at + 30, name_size)).decode("utf-8", "replace")
    if name.endswith((".pkl", ".pickle")):
        data = bytes(file.read(start, min(file.size - start, LARGEST_PICKLE)))
        yield from _scan_pickles(data, label, f"{name} at byte {at}", only_first=True)


def _scan_pickles(
    data: bytes, label: str, member: str | None, *, only_first: bool = False
) -> Iterator[Finding]:
    """All pickles that follow one another in ``data``."""
    at = 0
    while at < len(data):
        result = walk(data, at)
        for name, called in result.named.items():
            yield _judged(name.module, name.name, label, member, called=called)
        if result.fault is not None:
            yield _broken(label, member, f"the pickle is broken: {result.fault}")
            return
        at = result.end
        if only_first or data[at : at + 1] != b"\x80":
            return


def _judged(module: str, name: str, label: str, member: str | None, *, called: bool) -> Finding:
    verdict = judge(module, name)
    full = f"{module}.{name}"
    if verdict == "dangerous" or (verdict == "function" and called):
        reason = "it can run code" if verdict == "dangerous" else "an unknown function is called"
        return Finding(file=label, member=member, name=full, verdict="dangerous", reason=reason)
    if verdict == "known":
        return Finding(
            file=label, member=member, name=full, verdict="known", reason="built by our own code"
        )
    return Finding(
        file=label, member=member, name=full, verdict="inert", reason="shown by name, not built"
    )
