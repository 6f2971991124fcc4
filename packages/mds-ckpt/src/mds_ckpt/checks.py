"""What checks of a checkpoint report, and the check of formats that have no better one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError
from mds_ckpt.escape import printable

__all__ = ["Problem", "read_every_tensor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Something that is wrong with a checkpoint."""

    file: str
    """Name of the file at fault."""
    reason: str
    tensor: str | None = None
    """Canonical name of the tensor that it hurts, where that is known."""

    def __str__(self) -> str:
        where = f"{self.file}, tensor '{self.tensor}'" if self.tensor else self.file
        return printable(f"{where}: {self.reason}", longest=2000)


def read_every_tensor(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """The check of formats that have no better one: whether every tensor can be read."""
    if not data:
        return
    for state, tensors in checkpoint.states.items():
        for name, tensor in tensors.items():
            try:
                tensor.numpy()
            except RejectedError as error:
                what = name if state == "weight" else f"{name} ({state})"
                file = Path(error.path).name
                yield Problem(file=file, tensor=what, reason=error.reason)
