"""DeepSpeed's universal checkpoints, written by ``ds_to_universal`` or by DeepSpeed itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import Format
from mds_ckpt.plan import Options, Plan, refuse_layout
from mds_ckpt.read_options import ReadOptions


def find(path: Path) -> Path | None:
    """The folder with ``zero/``, at ``path`` or where ``latest_universal`` points."""
    from mds_ckpt.megatron.deepspeed_folder import resolve_folder

    if not path.is_dir():
        return None
    if (path / "zero").is_dir():
        return path
    folder = resolve_folder(path, pointer="latest_universal")
    return folder if folder is not None and (folder / "zero").is_dir() else None


def detect(path: Path) -> bool:
    """Whether ``path`` holds a universal checkpoint."""
    try:
        return find(path) is not None
    except RejectedError:
        return True


def open_universal(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a universal checkpoint, or the one that ``latest_universal`` names."""
    from mds_ckpt.megatron.universal_reader import read_universal

    folder = find(path)
    if folder is None:
        raise RejectedError(
            path, "it has no folder 'zero'", remedy="name the folder global_stepN_universal"
        )
    return read_universal(folder, options or ReadOptions())


def plan_universal(checkpoint: Checkpoint, options: Options) -> Plan:
    """How to write a universal checkpoint; it has no layout."""
    from mds_ckpt.writers.universal import plan

    # These say how parameters are called and padded, not who holds them.
    asked = replace(options, pipeline=None, divisible_by=None, zero_stage=None)
    refuse_layout(asked, "a universal checkpoint")
    return plan(checkpoint, options)


FORMAT = Format(
    name="universal",
    title="DeepSpeed universal checkpoint",
    detect=detect,
    open=open_universal,
    plan=plan_universal,
)
