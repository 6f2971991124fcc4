"""Every problem of a run as a line of JSON, in a file that an interrupted run can go on with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from mds_data.errors import DataError
from mds_data.preprocess.records import Problem

__all__ = ["ProblemFile"]


class ProblemFile:
    """Write problems to ``PATH.partial``, which gets its name when the block ends well.

    Args:
        path: The file.
        overwrite: Replace it if it is there.
        keep: Bytes of the interrupted run's partial file to go on from.

    Raises:
        DataError: The name is taken.
    """

    def __init__(self, path: Path, *, overwrite: bool, keep: int = 0) -> None:
        if path.is_dir():
            raise DataError(f"{path} is a folder; name a file in it.")
        if path.exists() and not overwrite:
            raise DataError(f"{path} exists. Choose another report, or replace it by --overwrite.")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._partial = path.with_name(f"{path.name}.partial")
        known = self._partial.stat().st_size if self._partial.exists() else 0
        self._file = self._partial.open("r+b" if 0 < keep <= known else "wb")
        self._file.truncate(keep if keep <= known else 0)
        self._file.seek(0, os.SEEK_END)

    def add(self, problems: Sequence[Problem]) -> None:
        """Write problems."""
        for problem in problems:
            self._file.write(json.dumps(asdict(problem)).encode() + b"\n")

    def sync(self) -> int:
        """Bring what was written to the disk; the bytes of the file so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def publish(self) -> None:
        """Give the file its name."""
        self.sync()
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Remove what was written."""
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
