"""Trackers of experiments, behind one protocol: W&B, MLflow, trackio.

A tracker is told a run's settings once and numbers by step. Each adapter imports its package when
it is used; without the package its error names the extra to install. A tracker that fails later
(its server is away) is said once and left out; the run goes on, and metrics.jsonl has it all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)

__all__ = ["TRACKERS", "Tracker", "TrackerWatcher", "open_tracker", "scalars_of"]

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One open run of a tracker."""

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Keep numbers of a step."""

    def finish(self, *, failed: bool) -> None:
        """Close the run."""


TRACKERS = ("wandb", "mlflow", "trackio")
"""The words of watch.trackers."""


def open_tracker(
    name: str, *, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
) -> Tracker:
    """Open a run of the named tracker; a resumed run goes on in the same one.

    Args:
        name: One of `TRACKERS`.
        project: Name of the project or experiment.
        run_name: Name of the run.
        folder: RUN_DIR; what the tracker keeps on disk goes below it.
        settings: The run's configuration, flat.

    Raises:
        ImportError: If its package is not installed; the text names the extra.
    """
    return _opener(name)(project=project, run_name=run_name, folder=folder, settings=settings)


def _opener(name: str) -> Callable[..., Tracker]:
    match name:
        case "wandb":
            from mds_train.watch.trackers.weights_and_biases import open_wandb

            return open_wandb
        case "mlflow":
            from mds_train.watch.trackers.mlflow_tracking import open_mlflow

            return open_mlflow
        case _:
            from mds_train.watch.trackers.trackio_tracking import open_trackio

            return open_trackio


def scalars_of(report: StepReport) -> dict[str, float]:
    """The numbers of a step, by the names that TensorBoard shows."""
    return {
        "train/loss": report.loss,
        "train/learning rate": report.lr,
        "train/weight decay": report.weight_decay,
        "train/gradient norm": report.grad_norm,
        "train/skipped steps": float(report.skipped_steps),
        "train/samples": float(report.consumed_samples),
        "train/tokens": float(report.consumed_tokens),
        "speed/tokens per second": report.tokens_per_second,
        "speed/seconds per step": report.seconds,
        "speed/data seconds": report.data_seconds,
        **{f"seconds/{phase}": seconds for phase, seconds in report.phases.items()},
    }


class TrackerWatcher:
    """Watcher that hands a run's numbers to a tracker; for rank 0 only.

    Args:
        name: Of the tracker.
        open_run: Opens it once the run starts, given the flat settings.
    """

    def __init__(self, name: str, open_run: Callable[[Mapping[str, Any]], Tracker]) -> None:
        self._name = name
        self._open_run = open_run
        self._tracker: Tracker | None = None

    def on_start(self, report: StartReport) -> None:
        """Open the tracker's run."""
        settings = {
            f"{table}.{key}": value
            for table, fields in report.config.as_dict().items()
            for key, value in fields.items()
        }
        self._tracker = self._open_run(settings)

    def on_step(self, report: StepReport) -> None:
        """Hand over a step's numbers."""
        self._log(scalars_of(report), step=report.step)

    def on_validation(self, report: ValidationReport) -> None:
        """Hand over a validation loss."""
        self._log({f"validation/{report.name} loss": report.loss}, step=report.step)

    def on_event(self, report: EventReport) -> None:
        """Nothing: trackers keep numbers."""

    def on_finish(self, report: FinishReport) -> None:
        """Close the tracker's run."""
        del report
        self._finish(failed=False)

    def close(self) -> None:
        """Close it, where the run did not end well."""
        self._finish(failed=True)

    def _log(self, scalars: Mapping[str, float], *, step: int) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.log(scalars, step=step)
        except Exception as error:  # noqa: BLE001 (its package's own errors, of any kind)
            self._give_up(error)

    def _finish(self, *, failed: bool) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is None:
            return
        try:
            tracker.finish(failed=failed)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning(
            "%s failed and gets nothing from here on (%s); metrics.jsonl has everything.",
            self._name,
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        self._tracker = None
