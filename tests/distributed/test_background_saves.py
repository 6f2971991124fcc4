"""Saves in the background of two ranks: the same checkpoints, encrypted ones too.

One rank's failure is all's.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from recorded_runs import Recorder, checkpoint_differences, train_each
from tiny_run import make_store, tiny_config

from mds_ckpt import KeySource, commit
from mds_ckpt.encryption.keys import new_identity
from mds_ckpt.protection.encrypt import decrypt_checkpoint
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(240)


def config_in(folder: Path, name: str, **checkpoint: Any) -> TrainConfig:
    settings = {"save_interval": 2, **checkpoint}
    return tiny_config(folder / "store", folder / name, checkpoint=settings)


def train_with_a_full_disk(config: TrainConfig) -> str:
    """The last rank cannot write its second file."""
    from mds_train import train
    from mds_train.save import write_snapshot

    def write(snapshot: Any, partial: Path, *, rank: int, place: Any) -> Any:
        if rank == 1 and snapshot.state.iteration == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_snapshot(snapshot, partial, rank=rank, place=place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mds_train.saving.saver.write_snapshot", write)
        try:
            train(config, watchers=[Recorder()])
        except OSError as error:
            return f"rank {dist.get_rank()}: {error}"
    return "no error"


def everything(configs: list[TrainConfig], full: TrainConfig) -> tuple[list[Recorder], str]:
    return train_each(configs), train_with_a_full_disk(full)


def test_background_saves_are_exact_and_fail_on_all_ranks_together(tmp_path: Path) -> None:
    make_store(tmp_path)
    second = tmp_path / "second"
    plain = config_in(tmp_path, "plain")
    background = config_in(tmp_path, "background", async_save=True, backup=str(second))
    recipient = new_identity(tmp_path / "key.txt")
    key = KeySource(identity=tmp_path / "key.txt")
    sealed = config_in(tmp_path, "sealed", async_save=True, encrypt_to=(recipient,))
    full = config_in(tmp_path, "full", async_save=True)

    found = run_ranks(everything, 2, [plain, background, sealed], full)

    for rank, ((first, other, hidden), failure) in enumerate(found):
        assert other.losses == hidden.losses == first.losses
        events = [event.event for event in other.events if event.event in ("save", "backup")]
        assert events == ["save", "backup"] * 3
        assert failure == f"rank {rank}: [Errno 28] No space left on device"
    for step in (2, 4, 6):
        expected = tmp_path / "plain" / "checkpoints" / f"step-{step}"
        for root in (tmp_path / "background", second):
            assert checkpoint_differences(expected, root / "checkpoints" / f"step-{step}") == []
        opened = tmp_path / "opened" / f"step-{step}"
        opened.parent.mkdir(exist_ok=True)
        decrypt_checkpoint(tmp_path / "sealed" / "checkpoints" / opened.name, opened, key=key)
        assert checkpoint_differences(expected, opened) == []
    left = {path.name for path in commit.step_folders(tmp_path / "full" / "checkpoints")}
    assert left == {"step-2"}
