"""Saves in the background, in a second place and in need, seen from the loop of one process."""

from __future__ import annotations

import errno
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import Recorder, checkpoint_differences, make_store, run_here, tiny_config

from mds_ckpt import commit
from mds_train import TrainConfig, train
from mds_train.events import StepReport
from mds_train.save import write_snapshot

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a run of six steps whose saves did not go to the background."""
    path = tmp_path_factory.mktemp("saver")
    make_store(path)
    run_here(tiny_config(path))
    return path


def config_in(folder: Path, run_dir: Path, **changes: dict[str, Any]) -> TrainConfig:
    config = tiny_config(folder, **changes)
    return replace(config, train=replace(config.train, run_dir=str(run_dir)))


def steps_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in commit.step_folders(run_dir / "checkpoints"))


class At(Recorder):
    """Does something after a step."""

    def __init__(self, step: int, action: Any) -> None:
        super().__init__()
        self.step, self.action = step, action

    def on_step(self, report: StepReport) -> None:
        super().on_step(report)
        if report.step == self.step:
            self.action()


def test_saves_in_the_background_hold_their_own_moment(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 is written only after step 5 has changed everything, and is still step 3."""
    may_write = threading.Event()
    root = tmp_path / "run" / "checkpoints"
    seen: list[bool] = []

    def write_late(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(60)
        return write_snapshot(*args, **kwargs)

    def let_write() -> None:
        seen.append((root / "step-3").exists())
        may_write.set()

    monkeypatch.setattr("mds_train.saving.saver.write_snapshot", write_late)
    recorder = At(5, let_write)

    train(config_in(folder, tmp_path / "run", checkpoint={"async_save": True}), watchers=[recorder])

    assert seen == [False]  # it does not exist before its commit
    assert checkpoint_differences(root / "step-3", folder / "run" / "checkpoints" / "step-3") == []
    assert checkpoint_differences(root / "step-6", folder / "run" / "checkpoints" / "step-6") == []
    saves = [event for event in recorder.events if event.event == "save"]
    assert [event.details["saved_step"] for event in saves] == [3, 6]
    assert saves[0].step >= 5


def test_one_save_waits_for_the_other(folder: Path, tmp_path: Path) -> None:
    settings = {"async_save": True, "save_interval": 1}

    recorder, result = run_here(config_in(folder, tmp_path / "run", checkpoint=settings))

    assert steps_in(tmp_path / "run") == [f"step-{step}" for step in range(1, 7)]
    saved = [e.details["saved_step"] for e in recorder.events if e.event == "save"]
    assert saved == [1, 2, 3, 4, 5, 6]
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-6"


def test_what_fails_in_the_background_ends_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = iter([False, True, True])

    def write(*args: Any, **kwargs: Any) -> Any:
        if next(failures):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_snapshot(*args, **kwargs)

    monkeypatch.setattr("mds_train.saving.saver.write_snapshot", write)
    settings = {"async_save": True, "save_interval": 2}

    with pytest.raises(OSError, match="No space left"):
        run_here(config_in(folder, tmp_path / "run", checkpoint=settings))

    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {"step-2", "latest", ".mds-lock"}


def test_a_run_goes_on_from_its_second_place(folder: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    config = config_in(folder, tmp_path / "run", checkpoint={"backup": str(second)})
    recorder, _ = run_here(config)
    assert [e.event for e in recorder.events if e.event in ("save", "backup")] == [
        "save",
        "backup",
    ] * 2
    (damaged,) = (tmp_path / "run" / "checkpoints" / "step-6").glob("rank-*")
    damaged.write_bytes(b"")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-3")
    longer = replace(
        config,
        train=replace(config.train, train_steps=8),
        schedule=replace(config.schedule, override=True),
    )

    resumed, _ = run_here(longer, resume=True)

    assert resumed.starts[0].resumed_from == second / "checkpoints" / "step-6"
    assert any("Took the copy" in event.message for event in resumed.events)
    assert steps_in(second) == ["step-3", "step-6", "step-8"]


def test_a_run_goes_on_from_backups_at_a_url(folder: Path, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    config = config_in(folder, tmp_path / "run", checkpoint={"backup": url})
    run_here(config)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    longer = replace(
        config,
        train=replace(config.train, train_steps=8),
        schedule=replace(config.schedule, override=True),
    )

    with pytest.raises(ValueError, match="backups of another run already"):
        run_here(longer)
    resumed, _ = run_here(longer, resume=True)

    assert resumed.starts[0].resumed_from == tmp_path / "run" / "restored" / "step-6"
    assert any("Brought" in event.message for event in resumed.events)
    assert steps_in(tmp_path / "run") == ["step-8"]


def test_a_second_place_that_cannot_be_written_ends_no_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    config = config_in(folder, tmp_path / "run", checkpoint={"backup": str(tmp_path / "file")})

    recorder, result = run_here(config)

    assert result.reason == "done"
    failures = [e.message for e in recorder.events if e.event == "backup-failed"]
    assert len(failures) == 2
    assert "/file" in failures[0]
    assert "[Errno" not in failures[0]
    assert failures[0].endswith("whole; the next one is copied again.")
    assert steps_in(tmp_path / "run") == ["step-3", "step-6"]


def test_a_kill_switch_saves_and_ends_and_then_bars_the_start(folder: Path, tmp_path: Path) -> None:
    switch = tmp_path / "stop"
    config = config_in(folder, tmp_path / "run", train={"kill_switch_file": str(switch)})

    result = train(config, watchers=[At(2, switch.touch)])

    assert (result.reason, result.step) == ("kill-switch", 2)
    assert steps_in(tmp_path / "run") == ["step-2"]
    with pytest.raises(ValueError, match="kill switch is there"):
        run_here(config, resume=True)


def test_an_exit_interval_saves_once_and_counts_on(folder: Path, tmp_path: Path) -> None:
    config = config_in(folder, tmp_path / "run", train={"exit_interval": 3})

    recorder, first = run_here(config)
    _, second = run_here(config, resume=True)

    assert (first.reason, first.step) == ("exit-interval", 3)
    assert [event.event for event in recorder.events].count("save") == 1
    assert (second.reason, second.step) == ("exit-interval", 6)


def test_a_time_limit_saves_and_ends(folder: Path, tmp_path: Path) -> None:
    config = config_in(folder, tmp_path / "run", train={"exit_minutes": 1e-9})

    _, result = run_here(config)

    assert (result.reason, result.step) == ("time-limit", 1)
    assert steps_in(tmp_path / "run") == ["step-1"]


def test_a_loss_spike_is_saved(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = run_here(config_in(folder, tmp_path / "plain"))[0].losses
    monkeypatch.setattr(
        "mds_train.saving.spikes.SpikeDetector.is_spike", lambda _, loss: loss == losses[1]
    )
    config = config_in(folder, tmp_path / "run", checkpoint={"save_at_loss_spike": 2.0})

    recorder, _ = run_here(config)

    assert steps_in(tmp_path / "run") == ["step-2", "step-3", "step-6"]
    assert "spike" in [event.event for event in recorder.events]


def test_save_and_load_of_one_folder_go_on_with_the_run(folder: Path, tmp_path: Path) -> None:
    """The original's `--save X --load X`."""
    run_dir = tmp_path / "run"
    pair = {"load": str(run_dir)}
    config = config_in(folder, run_dir, checkpoint=pair, train={"exit_interval": 3})
    with pytest.raises(FileNotFoundError, match="--from-scratch-if-missing"):
        run_here(config)
    first = replace(config, checkpoint=replace(config.checkpoint, from_scratch_if_missing=True))

    run_here(first)
    recorder, _ = run_here(config)

    assert [step.step for step in recorder.steps] == [4, 5, 6]
    last = Path("checkpoints") / "step-6"
    assert checkpoint_differences(run_dir / last, folder / "run" / last) == []


def test_a_run_that_trains_nothing_measures_only(folder: Path, tmp_path: Path) -> None:
    last = folder / "run" / "checkpoints" / "step-6"
    config = config_in(
        folder, tmp_path / "run", checkpoint={"load": str(last)}, train={"skip_train": True}
    )

    recorder, result = run_here(config)

    assert (result.reason, result.step, recorder.steps) == ("skip-train", 6, [])
    assert result.validation_loss is not None
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_second_place_is_another_one(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is the run's own folder"):
        config_in(folder, tmp_path / "run", checkpoint={"backup": str(tmp_path / "run")})
