"""What looks on while a run goes: console, metrics file, TensorBoard, curves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.watch.console import ConsoleWatcher
from mds_train.watch.curves import CURVES_FILE, draw_curves, terminal_curves
from mds_train.watch.drawing import CurvesWatcher, unigram_entropy
from mds_train.watch.metrics import METRICS_FILE, History, MetricsFile, read_metrics
from mds_train.watch.tensorboard import TensorBoardWatcher
from mds_train.watch.throughput import peak_of

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
    peak = config.watch.peak_tflops or peak_of(device_name, precision=config.train.precision)
    with ExitStack() as stack:
        metrics = stack.enter_context(MetricsFile(run_dir / METRICS_FILE))
        lines = ConsoleWatcher(console, interval=config.watch.log_interval, peak_tflops=peak)
        stack.callback(lines.close)
        watchers: list[Watcher] = [metrics, lines]
        if config.watch.tensorboard:
            board = TensorBoardWatcher(run_dir / "tensorboard", peak_tflops=peak)
            stack.callback(board.close)
            watchers.append(board)
        if config.watch.curves:
            watchers.append(CurvesWatcher(console))
        yield tuple(watchers)
