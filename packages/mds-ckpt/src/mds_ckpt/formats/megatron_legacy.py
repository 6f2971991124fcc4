"""Megatron's ``torch`` checkpoints: ``iter_NNNNNNN/mp_rank_XX[_YYY]/model_optim_rng.pt``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.checks import Problem, read_every_tensor
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import Format
from mds_ckpt.plan import Options, Plan, refuse_options
from mds_ckpt.read_options import ReadOptions

TRACKER = "latest_checkpointed_iteration.txt"


def find(path: Path) -> Path | None:
    """The folder with ranks' folders, at ``path`` or where the tracker file points."""
    from mds_ckpt.files.regular_file import read_whole
    from mds_ckpt.megatron.megatron_reader import list_ranks

    if not path.is_dir():
        return None
    if list_ranks(path):
        return path
    tracker = path / TRACKER
    if not tracker.is_file() and not tracker.is_symlink():
        return None
    text = read_whole(tracker, limit=4096).decode("utf-8", "replace").strip()
    if text != "release" and not (text.isascii() and text.isdecimal() and len(text) <= 15):
        raise RejectedError(
            tracker,
            "it holds neither a number nor 'release'",
            remedy="write the iteration's number into it",
        )
    folder = path / ("release" if text == "release" else f"iter_{int(text):07d}")
    if folder.is_symlink() or not folder.is_dir() or not list_ranks(folder):
        return None
    return folder


def detect(path: Path) -> bool:
    """Whether ``path`` holds ranks' folders with Megatron's files."""
    try:
        return find(path) is not None
    except RejectedError:
        return any(path.glob("iter_*")) or (path / "release").is_dir()


def open_megatron(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a Megatron checkpoint, or the one that the tracker file names."""
    from mds_ckpt.megatron.megatron_reader import read_megatron

    folder = find(path)
    if folder is None:
        raise RejectedError(
            path, "it holds no mp_rank_* folders", remedy="name the folder iter_NNNNNNN"
        )
    return read_megatron(folder, options or ReadOptions())


def check(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """Damaged members, and with data also tensors that can't be read or whose copies differ."""
    from mds_ckpt.megatron.deepspeed_check import damaged_members
    from mds_ckpt.megatron.distributed_optimizer import FILE as DISTRIBUTED
    from mds_ckpt.megatron.megatron_reader import FILE, list_ranks

    for rank in list_ranks(checkpoint.path):
        for path in (rank.path / FILE, rank.path / DISTRIBUTED):
            if path.name == FILE or path.exists():
                yield from damaged_members(path, data=data)
    yield from read_every_tensor(checkpoint, data)


def plan_megatron(checkpoint: Checkpoint, options: Options) -> Plan:
    """How to write a checkpoint for Megatron."""
    asked = {
        "--dp": options.dp_size != 1 and not options.distributed_optimizer,
        "--ep": options.ep_size != 1,
        "--zero-stage": options.zero_stage is not None,
        "--pipeline": options.pipeline is not None,
    }
    refuse_options(asked, "Megatron's own checkpoints are not shared out by DeepSpeed")
    from mds_ckpt.megatron.target_layout import layout_of
    from mds_ckpt.writers.megatron import plan

    return plan(checkpoint, options, layout=layout_of(options))


FORMAT = Format(
    name="megatron",
    title="Megatron checkpoint",
    detect=detect,
    open=open_megatron,
    plan=plan_megatron,
    check=check,
)
