"""Megatron-DeepSpeed's own checkpoints: pipeline or not, ZeRO 0 to 3, any tensor-parallel size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import Format
from mds_ckpt.plan import Options, Plan, refuse_options
from mds_ckpt.read_options import ReadOptions

NAME = "deepspeed"


def find(path: Path) -> Path | None:
    """The folder with model files, at ``path`` or where ``latest`` points; None if none is."""
    from mds_ckpt.megatron.deepspeed_folder import list_folder, newest_step, resolve_folder

    if not path.is_dir():
        return None
    if not list_folder(path).is_empty:
        return path
    folder = resolve_folder(path) or newest_step(path)
    return folder if folder is not None and not list_folder(folder).is_empty else None


def detect(path: Path) -> bool:
    """Whether ``path`` holds DeepSpeed's model files and no universal checkpoint."""
    try:
        folder = find(path)
    except RejectedError:
        # A hostile or broken `latest` beside DeepSpeed's folders; opening will say so.
        return not (path / "latest_universal").exists()
    from mds_ckpt.megatron.neox_folder import is_gpt_neox

    return folder is not None and not (folder / "zero").is_dir() and not is_gpt_neox(folder)


def open_deepspeed(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a DeepSpeed checkpoint, or the newest one of a folder."""
    from mds_ckpt.megatron.deepspeed_reader import read_deepspeed

    folder = find(path)
    if folder is None:
        raise RejectedError(
            path, "it holds no DeepSpeed model files", remedy="name the folder global_stepN"
        )
    return read_deepspeed(folder, options or ReadOptions())


def check(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """What is missing or damaged, file by file, and with data also tensor by tensor."""
    from mds_ckpt.megatron.deepspeed_check import check_deepspeed

    yield from check_deepspeed(checkpoint, data=data)


def plan_deepspeed(checkpoint: Checkpoint, options: Options) -> Plan:
    """How to write a checkpoint for Megatron-DeepSpeed's pipeline."""
    from mds_ckpt.megatron.target_layout import layout_of
    from mds_ckpt.writers.deepspeed import plan

    asked = {"--use-distributed-optimizer": options.distributed_optimizer}
    refuse_options(asked, "that optimizer is Megatron's own, DeepSpeed has ZeRO")
    return plan(checkpoint, options, layout=layout_of(options))


FORMAT = Format(
    name=NAME,
    title="Megatron-DeepSpeed checkpoint",
    detect=detect,
    open=open_deepspeed,
    plan=plan_deepspeed,
    check=check,
)
