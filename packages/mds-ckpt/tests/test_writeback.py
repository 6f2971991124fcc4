"""Hints that let the disk begin while a file is being written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from mds_ckpt.files.writeback import Writeback

MB = 1 << 20


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such hints")
def test_every_stretch_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[int, int]] = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda _, start, count, __: named.append((start, count))
    )
    with (tmp_path / "file").open("wb") as file:
        writeback = Writeback(file)

        for nbytes in (5 * MB, 5 * MB, 1 * MB, 20 * MB, 3 * MB):
            writeback.wrote(nbytes)
        writeback.complete()
        writeback.wrote(1000)
        writeback.complete()
        elsewhere = Writeback(file, start=50 * MB)
        elsewhere.wrote(9 * MB)

    assert named == [(0, 10 * MB), (10 * MB, 21 * MB), (31 * MB, 3 * MB), (50 * MB, 9 * MB)]


def test_what_is_no_file_of_the_system_gets_no_hints() -> None:
    writeback = Writeback(object())  # type: ignore[arg-type]

    writeback.wrote(100 * MB)
    writeback.complete()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such hints")
def test_a_file_system_without_hints_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refused)
    with (tmp_path / "file").open("wb") as file:
        Writeback(file).wrote(100 * MB)
