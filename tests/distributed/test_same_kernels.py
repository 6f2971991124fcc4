"""Ranks that would use different kernels do not start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny_run import make_store, tiny_config

from mds_kernels import dispatch
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(120)


def start_with_another_kernel(config: TrainConfig) -> str:
    """On the last rank the choice for one op is another one."""
    from mds_train import train
    from mds_train.errors import MachineError

    usual, is_last = dispatch.why, dist.get_rank() == dist.get_world_size() - 1

    def why(op: str, **where: Any) -> dispatch.Choice:
        choice = usual(op, **where)
        return replace(choice, backend="apex") if is_last and op == "rms_norm" else choice

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "why", why)
        try:
            train(config)
        except MachineError as error:
            return str(error)
    return ""


def test_the_kernel_and_the_ranks_are_named(tmp_path: Path) -> None:
    config = tiny_config(make_store(tmp_path), tmp_path / "run", checkpoint={"save_final": False})

    for message in run_ranks(start_with_another_kernel, 2, config, timeout=100):
        assert "different backends of rms_norm (rank 0 torch, rank 1 apex)" in message
