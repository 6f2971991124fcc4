"""Check that a checkpoint is whole and as it was written: every file, digest and tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.inspection import problems

if TYPE_CHECKING:
    from mds_ckpt.encryption.keys import KeySource


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was checked, and what is wrong with it."""

    checkpoint: Checkpoint
    problems: tuple[Problem, ...]
    num_tensors: int
    nbytes: int


def verify(
    path: str | Path,
    *,
    format: str | None = None,
    key: KeySource | None = None,
    expect: str | None = None,
) -> Verdict:
    """Read every byte of a checkpoint and compare it with what was promised.

    Args:
        path: As for :func:`mds_ckpt.open_checkpoint`.
        format: As for :func:`mds_ckpt.open_checkpoint`.
        key: As for :func:`mds_ckpt.open_checkpoint`.
        expect: As for :func:`mds_ckpt.open_checkpoint`.

    Raises:
        RejectedError: If it can't be opened at all.
    """
    checkpoint = open_checkpoint(path, format=format, key=key, expect=expect)
    tensors = [tensor for part in checkpoint.states.values() for tensor in part.values()]
    return Verdict(
        checkpoint=checkpoint,
        problems=tuple(problems(checkpoint, data=True)),
        num_tensors=len(tensors),
        nbytes=sum(tensor.nbytes for tensor in tensors),
    )
