"""What looks on while a run goes: console, metrics file, TensorBoard, curves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_train.watch.console import ConsoleWatcher
from mds_train.watch.curves import CURVES_FILE, draw_curves, terminal_curves
from mds_train.watch.drawing import CurvesWatcher, unigram_entropy
from mds_train.watch.metrics import METRICS_FILE, History, MetricsFile, read_metrics
from mds_train.watch.tensorboard import TensorBoardWatcher
from mds_train.watch.throughput import peak_of
from mds_train.watch.trackers import Tracker, TrackerWatcher, open_tracker

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.config import TrainConfig
    from mds_train.events import Watcher

__all__ = [
    "CURVES_FILE",
    "METRICS_FILE",
    "ConsoleWatcher",
    "CurvesWatcher",
    "History",
    "MetricsFile",
    "TensorBoardWatcher",
    "draw_curves",
    "read_metrics",
    "terminal_curves",
    "unigram_entropy",
    "watching",
]

logger = logging.getLogger(__name__)


@contextmanager
def watching(
    config: TrainConfig, *, rank: int, console: Console, device_name: str = ""
) -> Iterator[tuple[Watcher, ...]]:
    """Give the watchers that a configuration asks for, and close them whatever happens.

    Args:
        config: the run's configuration.
        rank: only rank 0 gets watchers.
        console: where rank 0 prints.
        device_name: what torch calls the accelerator; its peak may be known.
    """
    if rank != 0:
        yield ()
        return
    run_dir = Path(config.train.run_dir)
    peak = config.watch.peak_tflops or _peak(config, device_name=device_name)
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(run_dir / METRICS_FILE))
        lines = ConsoleWatcher(console, interval=config.watch.log_interval, peak_tflops=peak)
        stack.callback(lines.close)
        watchers: list[Watcher] = [metrics, lines]
        if config.watch.tensorboard:
            board = TensorBoardWatcher(run_dir / "tensorboard", peak_tflops=peak)
            stack.callback(board.close)
            watchers.append(board)
        for name in config.watch.trackers:
            tracker = TrackerWatcher(name, _opening(name, config, run_dir=run_dir))
            stack.callback(tracker.close)
            watchers.append(tracker)
        if config.watch.curves:
            watchers.append(CurvesWatcher(console))
        yield tuple(watchers)


def _opening(
    name: str, config: TrainConfig, *, run_dir: Path
) -> Callable[[Mapping[str, Any]], Tracker]:
    return lambda settings: open_tracker(
        name,
        project=config.watch.project,
        run_name=config.watch.run_name or run_dir.name,
        folder=run_dir,
        settings=settings,
    )


def _peak(config: TrainConfig, *, device_name: str) -> float | None:
    """The device's peak: from the maker's data sheet, or measured if asked for."""
    if not config.watch.measure_peak:
        return peak_of(device_name, precision=config.train.precision)
    import torch

    from mds_train.watch.peak import measured_peak

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    device = torch.device("cuda" if device_name else "cpu")
    dtype = dtypes.get(config.train.precision, torch.float32)
    found = measured_peak(device, dtype=dtype)
    logger.info("Measured peak of one device: %.3g TFLOP/s in %s.", found, config.train.precision)
    return found
