"""The memory that a plan names is the peak that torch's allocator sees in a real run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import Layout, always
from tiny_run import tiny_config

from mds_data import write_store
from mds_kernels.testing import run_ranks
from mds_train.config import TrainConfig
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
LAYOUTS = always(
    [
        Layout(1, 1, 1),
        Layout(2, 1, 1, pp_size=2),
    ],
    [
        Layout(1, 1, 0),
        Layout(1, 1, 0, recompute="full"),
        Layout(1, 1, 2),
        Layout(1, 1, 3),
        Layout(2, 1, 0),
        Layout(2, 1, 1),
        Layout(2, 2, 1),
        Layout(2, 1, 0, pp_size=2, schedule="gpipe"),
    ],
)


def peak_of(config: TrainConfig) -> int:
    """Most bytes of tensors that were there at a time, from before the engine to the end."""
    from mds_train import train

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        train(config)
    assert profile.profiler is not None
    events = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return int(np.cumsum([size for _, size in sorted(events)]).max())


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
        train={"train_steps": 2, "precision": layout.precision},
        schedule={"warmup_steps": 0},
        parallel=layout.parallel,
        memory=layout.memory,
        checkpoint={"save_final": False},
    )

    peaks = run_ranks(peak_of, layout.ranks, config, timeout=200)

    planned = plan_memory(config, world_size=layout.ranks).total
    assert max(peaks) == pytest.approx(planned, rel=0.1)
