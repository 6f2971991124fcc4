"""The memory that a plan names is the peak that torch's allocator sees in a real run."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import Layout, always
from recorded_runs import Recorder
from tiny_run import tiny_config

from mds_data import write_store
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
from mds_train.events import StepReport
from mds_train.plan.memory import plan_memory

pytestmark = pytest.mark.timeout(300)

WORDS = 1000
SHAPE = {
    "num_layers": 4,
    "hidden_size": 192,
    "num_key_value_heads": None,
    "num_attention_heads": 6,
    "ffn_hidden_size": 768,
    "activation": "gelu",
    "vocab_size": WORDS,
    "max_position_embeddings": 128,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
PRECISIONS = ("fp32", "bf16", "fp16")
LAYOUTS = always(
    [
        Layout(1, 1, 1),
        Layout(2, 1, 1, pp_size=2),
    ],
    [
        *(
            Layout(ranks, 1, stage, precision=precision)
            for precision in PRECISIONS
            for ranks in (1, 2)
            for stage in range(4)
            if (precision, ranks, stage) != ("fp32", 1, 1)
        ),
        Layout(1, 1, 0, recompute="full"),
        Layout(2, 2, 1),
        Layout(2, 1, 0, pp_size=2, schedule="gpipe"),
        Layout(2, 1, 1, pp_size=2, precision="bf16"),
    ],
)


class Marks(Recorder):
    """Notes when each step was done, on the profiler's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[int] = []

    def on_step(self, report: StepReport) -> None:
        super().on_step(report)
        self.times.append(time.time_ns())


def peak_of(config: TrainConfig) -> int:
    """Most bytes of tensors that are there at a time in each step after the first.

    gloo's threads let go of what they have summed a moment too late, now and then: so it is the
    least of the steps' peaks.
    """
    from mds_train import train

    marks, activities = Marks(), [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        train(config, watchers=[marks])
    assert profile.profiler is not None
    held = allocations(profile.profiler.kineto_results.experimental_event_tree())
    moments, sums = (np.array(each) for each in zip(*held, strict=True))
    places = np.searchsorted(moments, marks.times)
    return min(int(sums[i:j].max()) for i, j in itertools.pairwise(places)) - sums[0]


def allocations(events: Iterable[Any]) -> list[tuple[int, int]]:
    """When something was allocated or freed, and the allocator's own sum then."""
    waiting, held = list(events), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag.name == "Allocation":
            held.append((event.start_time_ns, event.extra_fields.total_allocated))
    return sorted(held)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peaks") / "store"
    random = np.random.default_rng(7)
    documents = [random.integers(0, WORDS, 400) for _ in range(60)]
    write_store(path, documents, vocab_size=WORDS, eod_id=0)
    return path


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_run_peaks_where_it_was_planned(store: Path, tmp_path: Path, layout: Layout) -> None:
    config = tiny_config(
        store,
        tmp_path / "run",
        model=SHAPE,
        data={"seq_length": 128},
        train={"train_steps": 6, "precision": layout.precision, "device": "cpu"},
        schedule={"warmup_steps": 0},
        parallel=layout.parallel,
        memory=layout.memory,
        checkpoint={"save_final": False},
    )

    peaks = run_ranks(peak_of, layout.ranks, config, timeout=200)

    planned = plan_memory(config, world_size=layout.ranks, on_cpu=True).total
    assert max(peaks) == pytest.approx(planned, rel=0.1)
