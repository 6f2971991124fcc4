"""metrics.jsonl: every step, validation and event of a run, one JSON object a line.

The file only grows. A run that resumes from step N adds an event "resume" with that step; the lines
of later steps that stand before it belong to a future that did not happen, and the reader drops
them. So a crash between two saves loses nothing and counts nothing twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)

__all__ = ["METRICS_FILE", "History", "MetricsFile", "read_metrics"]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """What a run went through, without superseded steps."""

    train: tuple[Mapping[str, Any], ...]
    validation: tuple[Mapping[str, Any], ...]
    events: tuple[Mapping[str, Any], ...]

    @property
    def resume_steps(self) -> tuple[int, ...]:
        """Steps at which the run was taken up again."""
        resumes = (event for event in self.events if event["event"] == "resume")
        return tuple(sorted({int(event["step"]) for event in resumes}))


class MetricsFile:
    """Watcher that appends to RUN_DIR/metrics.jsonl; for rank 0 only."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def on_start(self, report: StartReport) -> None:
        """Note that the run starts, or from which checkpoint it goes on."""
        resumed = report.resumed_from is not None
        self._write(
            "event",
            {
                "event": "resume" if resumed else "start",
                "step": report.step,
                "message": _start_message(report),
                "world_size": report.world_size,
                "parallel": report.parallel,
                "num_parameters": report.num_parameters,
                "consumed_samples": report.consumed_samples,
            },
        )

    def on_step(self, report: StepReport) -> None:
        """Note a step."""
        self._write("train", dataclasses.asdict(report))

    def on_validation(self, report: ValidationReport) -> None:
        """Note a validation loss."""
        self._write("validation", dataclasses.asdict(report))

    def on_event(self, report: EventReport) -> None:
        """Note an event."""
        # The resume itself has been noted at the start; these are remarks about it.
        renamed = {"event": "resume-note"} if report.event == "resume" else {}
        self._write("event", dataclasses.asdict(report) | renamed)

    def on_finish(self, report: FinishReport) -> None:
        """Note the end."""
        self._write(
            "event",
            {
                "event": "finish",
                "step": report.step,
                "message": f"The run ended: {report.reason}.",
                "seconds": report.seconds,
            },
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, kind: str, fields: Mapping[str, Any]) -> None:
        entry = {"kind": kind, **{key: _finite(value) for key, value in fields.items()}}
        self._file.write(json.dumps(entry, default=str) + "\n")
        # The line is the system's from here on: a killed process does not lose it.
        self._file.flush()


def read_metrics(path: str | Path) -> History:
    """Read a metrics file; steps that a resume superseded are left out.

    Raises:
        ValueError: If a line in the middle of the file is no JSON object.
    """
    train: dict[int, Mapping[str, Any]] = {}
    validation: dict[tuple[int, str], Mapping[str, Any]] = {}
    events: list[Mapping[str, Any]] = []
    for entry in _entries(Path(path)):
        step = int(entry["step"])
        if entry["kind"] == "train":
            train[step] = entry
        elif entry["kind"] == "validation":
            validation[step, str(entry.get("name", "validation"))] = entry
        else:
            events.append(entry)
            if entry["event"] in ("resume", "start"):
                train = {key: value for key, value in train.items() if key <= step}
                validation = {key: value for key, value in validation.items() if key[0] <= step}
    return History(
        train=tuple(train[key] for key in sorted(train)),
        validation=tuple(validation[key] for key in sorted(validation)),
        events=tuple(events),
    )


def _entries(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # the run was killed while it wrote this line, or is writing it now
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: no JSON ({error.msg}); the file was changed by hand "
                    "or damaged. Remove the line to go on."
                ) from error
            yield entry


def _cut_torn_line(path: Path) -> None:
    """Take away a last line without its end, left by a killed process."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _start_message(report: StartReport) -> str:
    if report.resumed_from is None:
        return "The run starts."
    return f"The run goes on from {report.resumed_from} at step {report.step}."
