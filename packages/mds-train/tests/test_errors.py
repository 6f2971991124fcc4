from __future__ import annotations

import errno
import os

import pytest

from mds_ckpt import RejectedError
from mds_train.errors import InputError, MachineError, UsageError, describe


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("Unknown option --x."), 2, "Unknown option --x."),
        (InputError("a.toml: wrong."), 3, "a.toml: wrong."),
        (ValueError("hidden_size (3) is odd."), 3, "hidden_size (3) is odd."),
        (RejectedError("ckpt", "it is cut", remedy="copy it again"), 3, "ckpt: it is cut"),
        (FileNotFoundError(errno.ENOENT, "No such file", "store"), 3, "store: no such file"),
        (FileNotFoundError("runs/x holds no checkpoint."), 3, "runs/x holds no checkpoint."),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a/b"), 3, "a/b: Not a directory."),
        (PermissionError(errno.EACCES, "Permission denied", "/run"), 4, "/run: permission denied"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "/a"), 3, "/a: Too many levels"),
        (OSError(errno.EROFS, "Read-only file system", "/run"), 4, "read-only file system"),
        (OSError(errno.ENOSPC, "No space left", "step-10"), 4, "step-10: the disk is full"),
        (MachineError("no port"), 4, "no port"),
        (ImportError("No module named 'x'"), 4, "A package is missing"),
        (MemoryError(), 4, "Out of memory"),
        (RuntimeError("CUDA out of memory. Tried"), 4, "Out of memory: CUDA out of memory"),
        (RuntimeError("[gloo] Connection closed by peer"), 4, "another rank has died"),
        (RuntimeError("Timed out waiting 300000ms for recv"), 4, "another rank has died"),
        (KeyboardInterrupt(), 4, "Interrupted"),
    ],
)
def test_an_expected_error_has_a_code_and_one_sentence(
    error: BaseException, code: int, words: str
) -> None:
    failure = describe(error)

    assert failure.code == code
    assert words in failure.sentence
    assert "\n" not in failure.sentence
    assert failure.expected


def test_an_unexpected_error_names_its_kind_and_the_way_to_the_traceback() -> None:
    failure = describe(KeyError("loss"))

    assert failure.code == 4
    assert not failure.expected
    assert "KeyError" in failure.sentence
    assert "--debug" in failure.sentence


def test_a_system_error_without_a_file_still_says_what_it_is() -> None:
    assert describe(OSError(errno.EIO, os.strerror(errno.EIO))).sentence == "Input/output error."
