"""Blends, a growing batch and growing samples together: exact in every step and on resume."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import VOCABULARY, checkpoint_differences, run_here, tiny_config

from mds_data import write_store
from mds_train import TrainConfig
from mds_train.config import DataConfig

pytestmark = pytest.mark.timeout(120)


def config_in(folder: Path, name: str, **changes: dict[str, Any]) -> TrainConfig:
    train = {
        "run_dir": str(folder / name),
        "train_steps": 8,
        "rampup_batch_size": (4, 2, 12),
        **changes.pop("train", {}),
    }
    data = DataConfig(
        seq_length=16,
        stores=(str(folder / "a"), str(folder / "b")),
        weights=(0.7, 0.3),
        split="90,10,0",
        curriculum_start_length=8,
        curriculum_steps=5,
        curriculum_multiple=4,
    )
    return replace(tiny_config(folder, train=train, **changes), data=data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("growing")
    for name, seed in (("a", 1), ("b", 2)):
        random = np.random.default_rng(seed)
        documents = [random.integers(0, VOCABULARY, random.integers(8, 60)) for _ in range(60)]
        write_store(path / name, documents, vocab_size=VOCABULARY, eod_id=0)
    return path


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resume_in_the_middle_of_growth_is_bitwise(folder: Path, stage: int) -> None:
    layout = {"zero_stage": stage}
    whole, _ = run_here(config_in(folder, f"whole-{stage}", parallel=layout))
    saved = Path("checkpoints") / "step-3"
    shutil.copytree(folder / f"whole-{stage}" / saved, folder / f"again-{stage}" / saved)

    rest, result = run_here(config_in(folder, f"again-{stage}", parallel=layout), resume=True)

    assert [step.batch_samples for step in whole.steps] == [4, 4, 6, 8, 8, 8, 8, 8]
    assert [step.seq_length for step in whole.steps] == [8, 8, 12, 12, 16, 16, 16, 16]
    assert rest.losses == whole.losses[3:]
    assert result.checkpoint is not None
    last = folder / f"whole-{stage}" / "checkpoints" / "step-8"
    assert checkpoint_differences(last, result.checkpoint) == []


def test_micro_batches_and_stages_change_nothing(folder: Path) -> None:
    def losses(name: str, *, micro_batch_size: int, zero_stage: int) -> list[float]:
        config = config_in(
            folder,
            name,
            train={"micro_batch_size": micro_batch_size},
            parallel={"zero_stage": zero_stage},
        )
        return run_here(config)[0].losses

    one = losses("one", micro_batch_size=1, zero_stage=0)
    two = losses("two", micro_batch_size=2, zero_stage=2)

    assert two == pytest.approx(one, rel=2e-6)


def test_another_blend_is_not_the_same_run(folder: Path) -> None:
    config = config_in(folder, "blend", train={"exit_step": 3})
    run_here(config)
    other = replace(config, data=replace(config.data, weights=(0.5, 0.5)))

    with pytest.raises(ValueError, match=r"data\.weights \[0\.7, 0\.3\] -> \[0\.5, 0\.5\]"):
        run_here(other, resume=True)
    swapped = replace(config, data=replace(config.data, stores=config.data.stores[::-1]))
    with pytest.raises(ValueError, match=r"data\.stores"):
        run_here(swapped, resume=True)
