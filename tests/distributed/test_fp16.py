"""fp16 with a loss scale: on every engine, over skipped steps, on resume, and at its end."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from recorded_runs import Recorder, checkpoint_differences, train_each
from tiny_run import make_store, tiny_config

from mds_ckpt import open_checkpoint
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(
        not torch.ops.mkldnn._is_mkldnn_fp16_supported() and not torch.cuda.is_available(),
        reason="this CPU does not compute in fp16",
    ),
]

LAYOUTS: dict[str, dict[str, object]] = {
    "dp2z0": {"zero_stage": 0},
    "dp2z1": {"zero_stage": 1},
    "dp2z2": {"zero_stage": 2},
    "dp2z3": {"zero_stage": 3},
    "tp2z0": {"tp_size": 2, "zero_stage": 0},
    "tp2z1": {"tp_size": 2},
    "pp2z0": {"pp_size": 2, "zero_stage": 0},
    "pp2z1-zb-h1": {"pp_size": 2, "schedule": "zb-h1"},
}
# Far too large at first: 2**40 overflows until it has been halved some times.
SEARCH = {"initial_scale": 2.0**40, "hysteresis": 2, "window": 2}


def config_of(folder: Path, name: str, **changes: dict[str, object]) -> TrainConfig:
    tables: dict[str, dict[str, object]] = {
        "train": {"precision": "fp16"},
        "fp16": {"initial_scale": 2.0**14},
        "checkpoint": {"save_interval": 3},
    }
    tables |= {key: {**tables.get(key, {}), **values} for key, values in changes.items()}
    return tiny_config(folder / "store", folder / name, **tables)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fp16")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Recorder]:
    """One process: in fp32, in fp16, searching for the scale, and that resumed half way."""
    search = {"fp16": SEARCH, "train": {"train_steps": 40, "global_batch_size": 2}}
    half = {**search, "train": {**search["train"], "exit_step": 21}}
    on = {**search, "checkpoint": {"load": str(folder / "half" / "checkpoints" / "step-21")}}
    configs = {
        "fp32": config_of(folder, "fp32", train={"precision": "fp32"}),
        "fp16": config_of(folder, "one"),
        "search": config_of(folder, "search", **search),
        "half": config_of(folder, "half", **half),
        "on": config_of(folder, "on", **on),
    }
    found = run_ranks(train_each, 1, list(configs.values()), timeout=300)[0]
    return dict(zip(configs, found, strict=True))


@pytest.fixture(scope="module")
def spread(folder: Path) -> dict[str, Recorder]:
    configs = [config_of(folder, name, parallel=LAYOUTS[name]) for name in LAYOUTS]
    found = run_ranks(train_each, 2, configs, timeout=300)
    for first, second in zip(*found, strict=True):
        assert first.losses == second.losses
    return dict(zip(LAYOUTS, found[0], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_are_those_of_fp32_within_rounding(
    alone: dict[str, Recorder], spread: dict[str, Recorder], layout: str
) -> None:
    for run in (alone["fp16"], spread[layout]):
        losses = [step.loss for step in alone["fp32"].steps]
        assert [step.loss for step in run.steps] == pytest.approx(losses, rel=2e-4)
        norms = [step.grad_norm for step in alone["fp32"].steps]
        assert [step.grad_norm for step in run.steps] == pytest.approx(norms, rel=2e-3)
        assert {step.loss_scale for step in run.steps} == {2.0**14}


def test_what_was_written_has_the_scale_and_loads_bitwise_on_another_layout(
    folder: Path, spread: dict[str, Recorder]
) -> None:
    assert spread
    written = folder / "pp2z1-zb-h1" / "checkpoints" / "step-6"
    scaler = open_checkpoint(written).training["optimizer"]["loss_scaler"]
    assert scaler == {"scale": 2.0**14, "good_steps": 6, "forgiven": 2}
    again = config_of(folder, "again", checkpoint={"load": str(written)})

    run_ranks(train_each, 1, [again])

    assert checkpoint_differences(written, folder / "again" / "checkpoints" / "step-6") == []


def test_the_scale_is_looked_for_without_moving_anything_else(alone: dict[str, Recorder]) -> None:
    steps = alone["search"].steps

    # Two overflows halve for the first time, then each one does.
    assert [step.loss_scale for step in steps[:4]] == [2.0**40, 2.0**40, 2.0**39, 2.0**38]
    skipped = [step.skipped for step in steps]
    assert skipped[:10] == [True] * 10  # as many as would end a run in another precision
    assert not all(skipped)
    assert [step.applied_updates for step in steps] == [
        sum(not each for each in skipped[: index + 1]) for index in range(len(skipped))
    ]
    for before, after in itertools.pairwise(steps):
        if before.skipped:
            assert after.lr == before.lr


def test_the_scale_goes_on_after_a_resume(alone: dict[str, Recorder]) -> None:
    halves = alone["half"].steps + alone["on"].steps

    assert [step.loss_scale for step in halves] == [s.loss_scale for s in alone["search"].steps]
    assert [step.loss for step in halves] == [step.loss for step in alone["search"].steps]


def test_an_overflow_at_the_smallest_scale_ends_the_run(folder: Path) -> None:
    config = config_of(
        folder, "floor", fp16={"initial_scale": 2.0**40, "min_scale": 2.0**39, "hysteresis": 1}
    )

    with pytest.raises(Exception, match=r"Step 2 had gradients .* smallest loss scale \(5.49756e"):
        run_ranks(train_each, 1, [config])
