"""A resumed run is the uninterrupted one, bit for bit, on the same layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist
from engine_cases import Recorder, checkpoint_differences, make_store, run_here, tiny_config

from mds_kernels.testing import run_ranks
from mds_train import TrainConfig

pytestmark = pytest.mark.timeout(240)

RANKS = (1, 2)
CASES = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]


@dataclass(frozen=True)
class Comparison:
    """An uninterrupted run of 6 steps and one that was resumed at step 3."""

    straight: Recorder
    resumed: Recorder
    differences: list[str]
    optimizer_step: int


Found = dict[tuple[int, int, str], Comparison]


def compare_all(folder: Path) -> dict[tuple[int, str], Comparison]:
    """On every rank that runs now."""
    return {
        (stage, precision): compare(
            folder / f"{stage}-{precision}",
            tiny_config(
                folder.parent, train={"precision": precision}, parallel={"zero_stage": stage}
            ),
        )
        for stage, precision in CASES
    }


def compare(folder: Path, config: TrainConfig) -> Comparison:
    straight = replace(config, train=replace(config.train, run_dir=str(folder / "straight")))
    resumed = replace(config, train=replace(config.train, run_dir=str(folder / "resumed")))
    whole, _ = run_here(straight)
    if dist.get_rank() == 0:
        saved = Path("checkpoints") / "step-3"
        shutil.copytree(folder / "straight" / saved, folder / "resumed" / saved)
    dist.barrier()
    rest, result = run_here(resumed, resume=True)
    assert result.checkpoint is not None
    last = folder / "straight" / "checkpoints" / "step-6"
    return Comparison(
        straight=whole,
        resumed=rest,
        differences=checkpoint_differences(last, result.checkpoint),
        optimizer_step=rest.steps[-1].applied_updates,
    )


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("resume")
    make_store(folder)
    found: Found = {}
    for ranks in RANKS:
        first, *others = run_ranks(compare_all, ranks, folder / str(ranks), timeout=200)
        found |= {(ranks, *case): comparison for case, comparison in first.items()}
        for other in others:
            assert all(other[case].straight.losses == first[case].straight.losses for case in first)
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_the_losses_go_on_bit_for_bit(
    comparisons: Found, ranks: int, stage: int, precision: str
) -> None:
    found = comparisons[ranks, stage, precision]

    assert len(found.straight.losses) == 6
    assert found.resumed.losses == found.straight.losses[3:]
    assert [s.lr for s in found.resumed.steps] == [s.lr for s in found.straight.steps[3:]]
    norms = [step.grad_norm for step in found.straight.steps]
    assert [step.grad_norm for step in found.resumed.steps] == norms[3:]
    assert found.resumed.validations[-1].loss == found.straight.validations[-1].loss


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_weights_masters_and_moments_end_bit_for_bit(
    comparisons: Found, ranks: int, stage: int, precision: str
) -> None:
    found = comparisons[ranks, stage, precision]

    assert found.differences == []
    assert found.optimizer_step == 6


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_and_zero_stages_do_not_change_the_model(comparisons: Found, precision: str) -> None:
    reference = comparisons[1, 1, precision].straight
    exact = precision == "fp32"

    for (ranks, stage, other_precision), comparison in comparisons.items():
        if other_precision != precision:
            continue
        other = comparison.straight
        case = f"{ranks} ranks, zero stage {stage}"
        tolerance = 2e-6 if exact else 2e-3
        assert other.losses == pytest.approx(reference.losses, rel=tolerance), case
        norms, expected = ([s.grad_norm for s in run.steps] for run in (other, reference))
        assert norms == pytest.approx(expected, rel=1e-5 if exact else 2e-2), case
