"""A resumed run reads on in its order, or says that it would be another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import make_store, run_here, tiny_config

from mds_train import TrainConfig

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_store(tmp_path)
    return tmp_path


def config_in(folder: Path, *, order: str = "fast", **train: Any) -> TrainConfig:
    return tiny_config(
        folder,
        train={"train_steps": 4, **train},
        data={"order": order},
        schedule={"override": True},
        watch={"eval_interval": None},
    )


def test_a_smaller_batch_than_before_finds_the_samples_that_are_left(folder: Path) -> None:
    run_here(config_in(folder, exit_step=3))

    rest, _ = run_here(config_in(folder, global_batch_size=2), resume=True)

    # 3 * 8 samples are more than 4 steps of 2 would ever have read.
    assert [step.consumed_samples for step in rest.steps] == [26]


def test_a_longer_run_in_an_order_that_the_length_decides_is_refused(folder: Path) -> None:
    run_here(config_in(folder, order="megatron", exit_step=3))
    run_here(config_in(folder, order="megatron", exit_step=3), resume=True)

    with pytest.raises(ValueError, match=r"samples are others.*train.train_steps"):
        run_here(config_in(folder, order="megatron", train_steps=60), resume=True)
