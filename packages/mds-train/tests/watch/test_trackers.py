"""Each tracker gets the run's settings and numbers by its own package's calls."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shell_cases import finish, start, step, validation

from mds_train.watch.trackers import TRACKERS, TrackerWatcher, open_tracker, scalars_of


class Kept:
    """Stands for a tracker's package and keeps what it is given."""

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.ended: list[Any] = []

    # wandb, trackio
    def init(self, **settings: Any) -> Kept:
        self.opened.append(settings)
        return self

    def log(self, scalars: dict[str, float], *, step: int) -> None:
        self.logged.append((scalars, step))

    def finish(self, *, exit_code: int = 0) -> None:
        self.ended.append(exit_code)

    # mlflow
    def get_experiment_by_name(self, name: str) -> None:
        assert name == "project"

    def create_experiment(self, name: str) -> str:
        return f"id of {name}"

    def create_run(self, experiment_id: str, *, run_name: str) -> Any:
        self.opened.append({"experiment": experiment_id, "name": run_name})
        return SimpleNamespace(info=SimpleNamespace(run_id="run-7"))

    def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "run-7"
        if params:
            self.opened[-1].setdefault("config", {}).update(params)
        for name, value, number in metrics:
            self.logged.append(({name: value}, number))

    def set_terminated(self, run_id: str, *, status: str) -> None:
        self.ended.append(status)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """The three packages, as far as they are used."""
    found = Kept()
    mlflow = SimpleNamespace(
        MlflowClient=lambda: found,
        entities=SimpleNamespace(
            Param=lambda key, value: (key, value),
            Metric=lambda name, value, _, number: (name, value, number),
        ),
        utils=SimpleNamespace(time=SimpleNamespace(get_current_time_millis=lambda: 0)),
    )
    for name, module in (("wandb", found), ("trackio", found), ("mlflow", mlflow)):
        monkeypatch.setitem(sys.modules, name, module)
    return found


def watcher(name: str, folder: Path) -> TrackerWatcher:
    return TrackerWatcher(
        name,
        lambda settings: open_tracker(
            name, project="project", run_name="first", folder=folder, settings=settings
        ),
    )


@pytest.mark.parametrize("name", TRACKERS)
def test_settings_and_numbers_arrive(tmp_path: Path, kept: Kept, name: str) -> None:
    tracker = watcher(name, tmp_path)
    tracker.on_start(start(tmp_path))
    tracker.on_step(step(1, loss=4.5))
    tracker.on_validation(validation(1, loss=4.1))
    tracker.on_finish(finish(1))
    tracker.close()

    settings = kept.opened[0]["config"]
    assert str(settings["model.num_layers"]) == "2"
    numbers = {key: value for scalars, _ in kept.logged for key, value in scalars.items()}
    assert numbers["train/loss"] == 4.5
    assert numbers["validation/validation loss"] == 4.1
    assert {number for _, number in kept.logged} == {1}
    assert len(kept.ended) == 1


@pytest.mark.parametrize(("name", "end"), [("wandb", 1), ("mlflow", "FAILED"), ("trackio", 0)])
def test_a_run_that_did_not_end_well_is_closed_as_such(
    tmp_path: Path, kept: Kept, name: str, end: object
) -> None:
    tracker = watcher(name, tmp_path)
    tracker.on_start(start(tmp_path))
    tracker.close()

    assert kept.ended == [end]


@pytest.mark.parametrize("name", TRACKERS)
def test_without_its_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ImportError, match=rf'pip install\s+"mds-train\[{name}\]"'):
        watcher(name, tmp_path).on_start(start(tmp_path))


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(
    tmp_path: Path,
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def away(*_: object, **__: object) -> None:
        raise ConnectionError("the server is away\nand more")

    monkeypatch.setattr(kept, "log", away)
    tracker = watcher("wandb", tmp_path)
    tracker.on_start(start(tmp_path))
    with caplog.at_level(logging.WARNING):
        tracker.on_step(step(1))
        tracker.on_step(step(2))
        tracker.on_finish(finish(2))

    assert len(caplog.messages) == 1
    assert "wandb failed and gets nothing from here on (the server is away)" in caplog.text


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path, kept: Kept) -> None:
    for name in ("wandb", "mlflow"):
        for _ in range(2):
            watcher(name, tmp_path / name).on_start(start(tmp_path))

    wandb_ids = [opened["id"] for opened in kept.opened if "id" in opened]
    assert len(set(wandb_ids)) == 1
    assert [opened["name"] for opened in kept.opened if "experiment" in opened] == ["first"]


def test_the_parts_of_a_step_are_numbers_too() -> None:
    from dataclasses import replace

    report = replace(step(3), phases={"update": 0.25})

    assert scalars_of(report)["seconds/update"] == 0.25
