"""Lion, Muon and SGD go on from one process's checkpoint on other layouts, as one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
from layouts import always
from recorded_runs import Recorder, checkpoint_differences, train_and_record, train_each
from tiny_run import make_store, tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(420)

OPTIMIZERS: dict[str, dict[str, object]] = {
    "lion": {"name": "lion", "lr": 3e-4, "beta2": 0.99},
    "muon": {"name": "muon", "lr": 3e-3},
    "sgd": {"name": "sgd", "lr": 0.1},
    "plain-sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
}
STATES = {
    "lion": {"weight", "exp_avg"},
    "muon": {"weight", "momentum_buffer", "exp_avg", "exp_avg_sq"},
    "sgd": {"weight", "momentum_buffer"},
    "plain-sgd": {"weight"},
}
LAYOUTS: dict[str, dict[str, object]] = dict(
    always(
        [
            ("dp2z3", {"zero_stage": 3}),
            ("tp2z1", {"tp_size": 2}),
        ],
        [
            ("dp2z0", {"zero_stage": 0}),
            ("dp2z2", {"zero_stage": 2}),
            ("tp2z3", {"tp_size": 2, "zero_stage": 3}),
            ("pp2z1", {"pp_size": 2}),
        ],
    )
)


def config_of(folder: Path, name: str, optimizer: str, **changes: dict[str, object]) -> TrainConfig:
    return tiny_config(
        folder / "store",
        folder / f"{optimizer}-{name}",
        optimizer=OPTIMIZERS[optimizer],
        schedule={"min_lr": 1e-5},
        **{"checkpoint": {"save_interval": 3}, **changes},
    )


def checkpoint(folder: Path, name: str, optimizer: str, step: int) -> Path:
    return folder / f"{optimizer}-{name}" / "checkpoints" / f"step-{step}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("optimizers")
    make_store(path)
    return path


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, Recorder]:
    configs = [config_of(folder, "one", optimizer) for optimizer in OPTIMIZERS]
    return dict(zip(OPTIMIZERS, run_ranks(train_each, 1, configs)[0], strict=True))


@pytest.fixture(scope="module")
def continued(folder: Path, straight: dict[str, Recorder]) -> dict[tuple[str, str], Recorder]:
    del straight  # has written the checkpoints
    cells = [(layout, optimizer) for layout in LAYOUTS for optimizer in OPTIMIZERS]
    configs = [
        config_of(
            folder,
            layout,
            optimizer,
            parallel=LAYOUTS[layout],
            checkpoint={
                "load": str(checkpoint(folder, "one", optimizer, 3)),
                "save_initial": True,
                "save_interval": 3,
            },
        )
        for layout, optimizer in cells
    ]
    return dict(zip(cells, run_ranks(train_each, 2, configs, timeout=400)[0], strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(
    straight: dict[str, Recorder],
    continued: dict[tuple[str, str], Recorder],
    layout: str,
    optimizer: str,
) -> None:
    expected, found = straight[optimizer].losses, continued[layout, optimizer].losses

    assert found == pytest.approx(expected[3:], rel=TOLERANCES["layout_loss_float32"])


@pytest.fixture(scope="module")
def again(folder: Path, continued: dict[tuple[str, str], Recorder]) -> None:
    """What two ranks wrote, loaded and saved by one process."""
    del continued  # has written the checkpoints
    configs = [
        config_of(
            folder,
            "again",
            optimizer,
            checkpoint={"load": str(checkpoint(folder, "dp2z3", optimizer, 6))},
        )
        for optimizer in OPTIMIZERS
    ]
    run_ranks(train_each, 1, configs)


@pytest.mark.usefixtures("again")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_checkpoint_has_what_the_optimizer_keeps_and_loads_bitwise(
    folder: Path, optimizer: str
) -> None:
    from mds_ckpt import open_checkpoint

    written = checkpoint(folder, "dp2z3", optimizer, 6)

    assert set(open_checkpoint(written).states) == STATES[optimizer]
    assert checkpoint_differences(written, checkpoint(folder, "again", optimizer, 6)) == []


def test_another_optimizer_is_refused_by_name(folder: Path, straight: dict[str, Recorder]) -> None:
    del straight
    other = config_of(
        folder, "other", "sgd", checkpoint={"load": str(checkpoint(folder, "one", "lion", 3))}
    )

    with pytest.raises(Exception, match="holds the state of lion, but optimizer"):
        run_ranks(train_and_record, 1, other)
