from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from shell_cases import finish, start, step, validation

from mds_train.events import EventReport
from mds_train.watch.metrics import MetricsFile, read_metrics


def run(path: Path, *, first: int, last: int, loss: float) -> None:
    with MetricsFile(path) as metrics:
        metrics.on_start(start(path.parent, step=first))
        for number in range(first + 1, last + 1):
            metrics.on_step(step(number, loss=loss))
            metrics.on_validation(validation(number, loss=loss))
        metrics.on_finish(finish(last))


def test_every_line_is_an_object_with_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    run(path, first=0, last=2, loss=4.0)

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds == ["event", "train", "validation", "train", "validation", "event"]
    assert lines[1]["loss"] == 4.0
    assert lines[1]["consumed_tokens"] == 32


def test_steps_after_the_resume_point_are_superseded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(path, first=0, last=5, loss=4.0)

    run(path, first=3, last=4, loss=2.0)

    history = read_metrics(path)
    assert [(entry["step"], entry["loss"]) for entry in history.train] == [
        (1, 4.0),
        (2, 4.0),
        (3, 4.0),
        (4, 2.0),
    ]
    assert [entry["step"] for entry in history.validation] == [1, 2, 3, 4]
    assert history.resume_steps == (3,)


def test_a_line_torn_by_a_kill_is_cut_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    run(path, first=0, last=2, loss=4.0)
    with path.open("a") as file:
        file.write('{"kind": "train", "ste')
    assert len(read_metrics(path).train) == 2

    run(path, first=2, last=3, loss=2.0)

    assert [entry["step"] for entry in read_metrics(path).train] == [1, 2, 3]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.on_step(step(1, loss=math.nan))

    assert read_metrics(path).train[0]["loss"] is None


def test_remarks_about_a_resume_are_not_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.on_event(EventReport(event="resume", step=3, message="step-4 was skipped."))
        metrics.on_event(EventReport(event="save", step=5, message="Saved.", details={"s": 1}))

    history = read_metrics(path)
    assert [event["event"] for event in history.events] == ["resume-note", "save"]
    assert history.resume_steps == ()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}}\n")

    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: no JSON"):
        read_metrics(path)
