"""The torch files of one checkpoint, each opened once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mds_ckpt.errors import RejectedError
from mds_ckpt.pickles.archive import TorchFile, open_torch_file

__all__ = ["TorchFiles", "state_of"]


class TorchFiles:
    """Opens files that hold a dictionary, and remembers them."""

    def __init__(self) -> None:
        self._files: dict[Path, TorchFile] = {}

    def open(self, path: Path) -> TorchFile:
        """The file at ``path``; RejectedError unless it holds a dictionary."""
        if path not in self._files:
            file = open_torch_file(path)
            if not isinstance(file.value, dict):
                raise RejectedError(
                    path, "it does not hold a dictionary", remedy="copy the file again"
                )
            self._files[path] = file
        return self._files[path]


def state_of(file: TorchFile) -> Mapping[str, Any]:
    """The dictionary that a file holds."""
    value: Mapping[str, Any] = file.value
    return value
