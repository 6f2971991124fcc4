"""Draws the curves when a run ends: into RUN_DIR/curves.png and below the last line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mds_train.data.building import key_of
from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)
from mds_train.watch.curves import CURVES_FILE, draw_curves, terminal_curves
from mds_train.watch.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    from rich.console import Console

    from mds_data import KeySource

__all__ = ["CurvesWatcher", "unigram_entropy"]

logger = logging.getLogger(__name__)

_TOKENS_COUNTED = 20_000_000


class CurvesWatcher:
    """Watcher that draws at the end; for rank 0 only, after the metrics file."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start: StartReport | None = None

    def on_start(self, report: StartReport) -> None:
        """Remember which run it is."""
        self._start = report

    def on_step(self, report: StepReport) -> None:
        """Nothing: the metrics file keeps the steps."""

    def on_validation(self, report: ValidationReport) -> None:
        """Nothing: the metrics file keeps it."""

    def on_event(self, report: EventReport) -> None:
        """Nothing: the metrics file keeps it."""

    def on_finish(self, report: FinishReport) -> None:
        """Draw."""
        del report
        assert self._start is not None, "on_start comes first"
        run_dir = self._start.run_dir
        history = read_metrics(run_dir / METRICS_FILE)
        if not history.train:
            return
        picture = run_dir / CURVES_FILE
        (store, *others) = self._start.config.data.paths
        # Of a blend it would be that of the blend's tokens, which nobody has counted.
        key = key_of(self._start.config.data)
        entropy = None if others else unigram_entropy(Path(store), key=key)
        draw_curves(history, picture, title=run_dir.name, unigram_entropy=entropy)
        text = terminal_curves(history, width=self._console.width)
        if text:
            self._console.print(text, highlight=False, soft_wrap=True)
        self._console.print(f"Curves: {picture}", markup=False, highlight=False, soft_wrap=True)


def unigram_entropy(store_path: Path, *, key: KeySource | None = None) -> float:
    """Return the entropy of a store's token frequencies in nats.

    It is the loss of the best model that knows how frequent each token is and nothing of their
    order. At most the first 20 million tokens are counted.
    """
    from mds_data import open_store

    store = open_store(store_path, key=key)
    counts = np.zeros(store.vocab_size, dtype=np.int64)
    counted = 0
    for document in range(len(store)):
        tokens = np.asarray(store[document])
        counts += np.bincount(tokens, minlength=store.vocab_size)
        counted += len(tokens)
        if counted >= _TOKENS_COUNTED:
            break
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log(share)).sum())
