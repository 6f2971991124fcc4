"""What can go wrong, as classes. Each knows the exit code that the command line gives it.

CheckpointError            (ValueError)
├── UsageError             2  the request itself makes no sense
├── RejectedError          3  a file was refused: file, tensor, reason, remedy in one sentence
│   ├── UnknownFormatError 3  nothing here that we can read
│   ├── UnsupportedError   3  understood, but we can't carry it without changing the model
│   └── SealedError        3  an encrypted file or key that does not open
└── MachineError     4  disk full, no permission, somebody else holds the lock
    └── LockedError        4
"""

from __future__ import annotations

import os

from mds_ckpt.escape import printable


class CheckpointError(ValueError):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class UsageError(CheckpointError):
    """The request makes no sense, whatever the files hold."""

    exit_code = 2


class RejectedError(CheckpointError):
    """A file was refused. The message is one sentence: file, tensor, reason, remedy.

    Args:
        path: The file or folder that is refused.
        reason: What is wrong with it, with the values.
        remedy: What the user can do.
        tensor: The tensor, member or key at fault, where there is one.
    """

    exit_code = 3

    def __init__(
        self,
        path: str | os.PathLike[str],
        reason: str,
        *,
        remedy: str,
        tensor: str | None = None,
    ) -> None:
        self.path = os.fspath(path)
        self.reason = reason
        self.remedy = remedy
        self.tensor = tensor
        where = printable(self.path)
        if tensor is not None:
            where += f", tensor '{printable(tensor)}'"
        super().__init__(f"{where}: {reason}; {remedy}.")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.path, self.reason, self.remedy, self.tensor)


def _rebuild(
    kind: type[RejectedError], path: str, reason: str, remedy: str, tensor: str | None
) -> RejectedError:
    return kind(path, reason, remedy=remedy, tensor=tensor)


class UnknownFormatError(RejectedError):
    """No reader recognises this path."""


class UnsupportedError(RejectedError):
    """The file was understood, but it asks for something that we would have to change or drop."""


class SealedError(RejectedError):
    """Something encrypted does not open: a wrong key, or bytes that were changed."""


class MachineError(CheckpointError):
    """The machine refused: no space, no permission, a lock held by another process."""

    exit_code = 4


class LockedError(MachineError):
    """Another process holds the lock."""
