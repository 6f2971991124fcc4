"""Errors that a user can cause, and how any exception becomes an exit code and a sentence."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import IntEnum

__all__ = [
    "ExitCode",
    "Failure",
    "InputError",
    "LostRankError",
    "MachineError",
    "MdsTrainError",
    "UsageError",
    "describe",
    "in_words",
    "is_lost_rank",
]


class ExitCode(IntEnum):
    """What a command's exit status says."""

    DONE = 0
    DIFFERENCE = 1
    USAGE = 2
    INPUT = 3
    ENVIRONMENT = 4


class MdsTrainError(Exception):
    """Base of the errors below; its text is one message for a person: what, why, remedy."""


class LostRankError(MdsTrainError, RuntimeError):
    """Another rank is gone or stuck; the text names it."""


class UsageError(MdsTrainError, ValueError):
    """The command line is wrong."""


class InputError(MdsTrainError, ValueError):
    """A file or a value given by the user is rejected."""


class MachineError(MdsTrainError, RuntimeError):
    """The machine is in the way: disk, permission, a lost rank, a missing device."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception as a user sees it."""

    code: ExitCode
    sentence: str
    expected: bool
    """False for what we did not foresee: then the traceback is worth reading."""


_DISTRIBUTED_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "timed out waiting",
    "timeout",
    "socket",
    "nccl",
    "gloo",
)


def describe(error: BaseException) -> Failure:
    """Say how a command that ended with ``error`` exits, and with which sentence."""
    if isinstance(error, UsageError):
        return Failure(code=ExitCode.USAGE, sentence=str(error), expected=True)
    if isinstance(getattr(error, "exit_code", None), int) and not isinstance(error, SystemExit):
        # mds_ckpt's errors know their own.
        code = ExitCode(getattr(error, "exit_code"))  # noqa: B009
        return Failure(code=code, sentence=str(error), expected=True)
    if isinstance(error, (MachineError, LostRankError)):
        return Failure(code=ExitCode.ENVIRONMENT, sentence=str(error), expected=True)
    if isinstance(error, KeyboardInterrupt):
        sentence = "Interrupted. `mds-train resume RUN_DIR` goes on from the newest checkpoint."
        return Failure(code=ExitCode.ENVIRONMENT, sentence=sentence, expected=True)
    if isinstance(error, OSError):
        return _describe_os_error(error)
    if isinstance(error, ImportError):
        sentence = f"A package is missing or does not load: {error}. `mds-train doctor` lists them."
        return Failure(code=ExitCode.ENVIRONMENT, sentence=sentence, expected=True)
    if isinstance(error, ValueError):
        return Failure(code=ExitCode.INPUT, sentence=str(error), expected=True)
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return Failure(code=ExitCode.ENVIRONMENT, sentence=_memory_sentence(error), expected=True)
    if isinstance(error, RuntimeError) and _is_distributed(str(error)):
        return Failure(code=ExitCode.ENVIRONMENT, sentence=_lost_rank(error), expected=True)
    return Failure(
        code=ExitCode.ENVIRONMENT,
        sentence=(
            f"Unexpected {type(error).__name__}: {_first_line(str(error))}. This is a fault of the "
            "program, not of your input; run again with --debug for the traceback and report it."
        ),
        expected=False,
    )


def _describe_os_error(error: OSError) -> Failure:
    where = f"{error.filename}: " if error.filename else ""
    if isinstance(error, FileNotFoundError):
        # Our packages raise it with a whole sentence; the operating system gives errno and name.
        sentence = (
            f"{where}no such file or folder; check the path."
            if error.errno is not None
            else str(error)
        )
        return Failure(code=ExitCode.INPUT, sentence=sentence, expected=True)
    kinds = (IsADirectoryError, NotADirectoryError, FileExistsError)
    if isinstance(error, kinds) or error.errno == errno.ELOOP:
        sentence = f"{where}{error.strerror}." if error.errno is not None else str(error)
        return Failure(code=ExitCode.INPUT, sentence=sentence, expected=True)
    return Failure(
        code=ExitCode.ENVIRONMENT, sentence=_os_sentence(error, where=where), expected=True
    )


def _os_sentence(error: OSError, *, where: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"{where}the disk is full. Free some space, then `mds-train resume RUN_DIR` goes on "
            "from the newest complete checkpoint."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = (error.strerror or "no permission").lower()
        return f"{where}{reason}; choose a folder that you may write to, or change its permissions."
    if _is_distributed(str(error)):
        return _lost_rank(error)
    return f"{where}{error.strerror or error}."


def in_words(error: OSError) -> str:
    """What the system refused, without its number."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of torch says that another rank is gone or stuck."""
    return _is_distributed(str(error))


def _is_distributed(text: str) -> bool:
    lowered = text.lower()
    return any(sign in lowered for sign in _DISTRIBUTED_SIGNS)


def _lost_rank(error: BaseException) -> str:
    return (
        f"A collective failed, so another rank has died or is stuck: {_first_line(str(error))} "
        "Look at the logs/rank-N.log that ends first, then `mds-train resume RUN_DIR`."
    )


def _memory_sentence(error: BaseException) -> str:
    return (
        f"Out of memory: {_first_line(str(error)) or 'the system refused an allocation'}. Lower "
        "train.micro_batch_size or data.seq_length, raise parallel.tp_size, or use more ranks."
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
