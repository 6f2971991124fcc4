"""BERT, T5 and translation on any layout: the state bitwise, the losses those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_runs import MODELS, family_config, make_stores
from layouts import Layout, always
from recorded_runs import Recorder, checkpoint_differences, train_each

from mds_kernels.testing import TOLERANCES, run_ranks

pytestmark = pytest.mark.timeout(600)

PRECISIONS = ("fp32", "bf16")
CELLS = always(
    [("bert", Layout(2, 2, 1)), ("t5", Layout(2, 1, 3)), ("t5", Layout(2, 1, 1, pp_size=2))],
    [
        ("bert", Layout(2, 1, 0, pp_size=2)),
        ("bert", Layout(2, 1, 1, "bf16", pp_size=2, schedule="zb-h1")),
        ("bert", Layout(4, 2, 1, pp_size=2, schedule="gpipe")),
        ("t5", Layout(2, 1, 0, "bf16", pp_size=2, schedule="zb-v")),
        ("t5", Layout(2, 1, 1, pp_size=2, virtual_stages=2, partition="1,1,1,1")),
        ("t5", Layout(2, 1, 1, pp_size=2, schedule="zb-h1", partition="1,3")),
        ("t5", Layout(4, 1, 1, pp_size=4, partition="parameters")),
        ("t5", Layout(4, 2, 1, pp_size=2, partition="time")),
        ("bert", Layout(2, 1, 1, pp_size=2, partition="time")),
        ("t5", Layout(4, 2, 1, pp_size=2, sequence_parallel=True, split_rank=1)),
        ("translation", Layout(4, 1, 1, pp_size=2, split_rank=1)),
        ("translation", Layout(3, 1, 0, pp_size=3, split_rank=2)),
        ("t5", Layout(2, 2, 2, sequence_parallel=True)),
        ("bert", Layout(2, 2, 1, sequence_parallel=True)),
        ("bert", Layout(4, 2, 0, "bf16", pp_size=2, sequence_parallel=True)),
        *(
            (kind, Layout(ranks, tp_size, stage, precision))
            for kind in MODELS
            for ranks, tp_size in ((1, 1), (2, 1), (2, 2), (4, 2))
            for stage in (0, 1, 2, 3)
            for precision in PRECISIONS
        ),
    ],
)
cells = pytest.mark.parametrize(
    ("kind", "layout"), dict.fromkeys(CELLS), ids=lambda each: getattr(each, "name", each)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    make_stores(path)
    return path


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[tuple[str, str], Recorder]:
    """A run of one process of each kind and precision, with checkpoints 3 and 6."""
    runs = sorted({(kind, layout.precision) for kind, layout in CELLS})
    configs = [
        family_config(
            folder,
            kind,
            f"straight-{kind}-{precision}",
            train={"precision": precision},
            checkpoint={"save_interval": 3},
        )
        for kind, precision in runs
    ]
    return dict(zip(runs, run_ranks(train_each, 1, configs)[0], strict=True))


@pytest.fixture(scope="module")
def continued(
    folder: Path, straight: dict[tuple[str, str], Recorder]
) -> dict[tuple[str, Layout], Recorder]:
    """On each layout: step 3 loaded and saved again, and trained up to 6."""
    del straight  # has written the checkpoints
    found: dict[tuple[str, Layout], Recorder] = {}
    for ranks in sorted({layout.ranks for _, layout in CELLS}):
        own = [cell for cell in dict.fromkeys(CELLS) if cell[1].ranks == ranks]
        configs = [
            family_config(
                folder,
                kind,
                f"{run}-{kind}-{layout.name}",
                train={"precision": layout.precision, "exit_step": to},
                parallel=layout.parallel,
                checkpoint={"load": str(step_3(folder, kind, layout))},
            )
            for kind, layout in own
            for run, to in (("load", 3), ("go-on", 6))
        ]
        every_rank = run_ranks(train_each, ranks, configs, timeout=500)
        for others in every_rank[1:]:
            assert [each.losses for each in others] == [each.losses for each in every_rank[0]]
        found |= dict(zip(own, every_rank[0][1::2], strict=True))
    return found


def step_3(folder: Path, kind: str, layout: Layout) -> Path:
    return folder / f"straight-{kind}-{layout.precision}" / "checkpoints" / "step-3"


@cells
def test_the_state_is_bitwise_the_saved_one(
    folder: Path, continued: dict[tuple[str, Layout], Recorder], kind: str, layout: Layout
) -> None:
    assert len(continued[kind, layout].losses) == 3
    again = folder / f"load-{kind}-{layout.name}" / "checkpoints" / "step-3"

    assert checkpoint_differences(step_3(folder, kind, layout), again) == []


@cells
def test_losses_norms_and_validation_go_on_as_on_one_process(
    straight: dict[tuple[str, str], Recorder],
    continued: dict[tuple[str, Layout], Recorder],
    kind: str,
    layout: Layout,
) -> None:
    exact = layout.precision == "fp32"
    expected, found = straight[kind, layout.precision], continued[kind, layout]

    tolerance = TOLERANCES["layout_loss_float32" if exact else "layout_loss_bfloat16"]
    assert found.losses == pytest.approx(expected.losses[3:], rel=tolerance)
    for one, other in zip(found.steps, expected.steps[3:], strict=True):
        assert one.loss_terms == pytest.approx(other.loss_terms, rel=10 * tolerance)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5 if exact else 2e-2)
    assert found.validations[-1].tokens == expected.validations[-1].tokens
    assert found.validations[-1].loss == pytest.approx(expected.validations[-1].loss, rel=tolerance)
