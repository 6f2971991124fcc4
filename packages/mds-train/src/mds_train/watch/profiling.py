"""torch's profiler over some steps, and a snapshot of the accelerator's memory after one.

Written to RUN_DIR/profile: `rank-N-steps-A-B.json` for chrome://tracing or Perfetto, a text table
of the costliest operations beside it, and `rank-N-memory-step-S.pickle` for pytorch.org/memory_viz.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mds_train.config.watch import WatchConfig

__all__ = ["Profiling"]

logger = logging.getLogger(__name__)

_ROWS = 40


class Profiling:
    """Profiles this rank if the [watch] table says so.

    Args:
        config: The [watch] table.
        folder: RUN_DIR/profile.
        rank: This rank.
        device: Of the model.
    """

    def __init__(
        self, config: WatchConfig, *, folder: Path, rank: int, device: torch.device
    ) -> None:
        chosen = rank in config.profile_ranks
        self._steps = config.profile_steps if chosen else ()
        self._memory_step = config.memory_snapshot_step if chosen else None
        self._folder = folder
        self._rank = rank
        self._device = device
        self._profiler: Any = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Open while a step is done.

        Args:
            step: Its number; 1 is the first one.
        """
        if self._steps and step == self._steps[0]:
            self._profiler = self._begin()
        if step == self._memory_step and self._device.type == "cuda":
            torch.cuda.memory._record_memory_history()
        yield
        if self._profiler is not None:
            self._profiler.step()
        if self._steps and step == self._steps[1]:
            self.close()
        if step == self._memory_step:
            self._snapshot(step)

    def close(self) -> None:
        """Write what was profiled so far."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank}-steps-{self._steps[0]}-{self._steps[1]}"
        profiler.export_chrome_trace(str(self._folder / f"{name}.json"))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS)
        (self._folder / f"{name}.txt").write_text(table + "\n", encoding="utf-8")
        logger.info("Profiled steps %d to %d: %s", *self._steps, self._folder / f"{name}.json")

    def _begin(self) -> Any:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
        return profiler

    def _snapshot(self, step: int) -> None:
        if self._device.type != "cuda":
            logger.warning(
                "watch.memory_snapshot_step does nothing on %s: only CUDA's allocator keeps a "
                "history.",
                self._device.type,
            )
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}-memory-step-{step}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
        logger.info("Memory after step %d: %s", step, path)
