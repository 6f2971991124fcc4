"""From an exception to one sentence and an exit code. Importing this loads nothing heavy."""

from __future__ import annotations

import errno

__all__ = ["UsageError", "exit_code", "sentence"]

REJECTED = 3
ENVIRONMENT = 4
USAGE = 2
INTERRUPTED = 130
_DENIED = frozenset({errno.EACCES, errno.EPERM})
_CLEAN = " Nothing half-written is left."
_NOT_A_FILE = frozenset(
    {errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
)


class UsageError(ValueError):
    """Arguments that don't go together."""


def exit_code(error: BaseException) -> int:
    """Return 2 for wrong usage, 3 for rejected input, 4 for the environment."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno not in _NOT_A_FILE:
        return REJECTED if isinstance(error, FileNotFoundError) else ENVIRONMENT
    return ENVIRONMENT if isinstance(error, MemoryError) else REJECTED


def sentence(error: BaseException) -> str:
    """Return what happened and what to do, in one line."""
    text = _sentence(error)
    notes = getattr(error, "__notes__", ())
    return " ".join([text.removesuffix(_CLEAN), *notes]) if notes else text


def _sentence(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"stopped.{_CLEAN}"
    if isinstance(error, MemoryError):
        return "the memory is full; use fewer workers, or cut huge documents."
    if isinstance(error, OSError) and error.errno is not None:
        return _system_sentence(error)
    return " ".join(str(error).split())


def _system_sentence(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    if error.errno == errno.ENOSPC:
        return f"{where}the disk is full; free space or write to another disk.{_CLEAN}"
    if error.errno == getattr(errno, "EDQUOT", None):
        return f"{where}your quota is used up; free space or write to another disk.{_CLEAN}"
    if error.errno == errno.EROFS:
        return f"{where}this disk can only be read; choose another place."
    if error.errno == errno.EIO:
        return f"{where}the disk failed ({error.strerror}); look at it, or choose another place."
    if error.errno in _DENIED:
        return f"{where}no permission; change the file's rights or choose another place."
    if error.errno == errno.ENOENT:
        return f"{where}no such file or folder."
    if error.errno == errno.EEXIST:
        return f"{where}is there already, and nothing is written over; name another file."
    return f"{where}{error.strerror or error}."
