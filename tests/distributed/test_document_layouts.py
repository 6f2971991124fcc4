"""Samples whose documents do not see each other, on layouts that cut sequences, heads, layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import always
from recorded_runs import train_each
from tiny_run import VOCABULARY, tiny_config

from mds_data import write_store
from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

pytestmark = pytest.mark.timeout(300)

LAYOUTS = always(
    [
        {"tp_size": 2, "sequence_parallel": True},
        {"ulysses_size": 2},
        {"pp_size": 2},
    ],
    [
        {"zero_stage": 3},
        {"ulysses_size": 2, "sequence_sharing": "ring"},
        {"pp_size": 2, "schedule": "zb-h1", "zero_stage": 0},
    ],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of documents so short that every sample holds several."""
    path = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(8)
    documents = [[*random.integers(1, VOCABULARY, random.integers(3, 9)), 0] for _ in range(300)]
    write_store(path / "store", documents, vocab_size=VOCABULARY, eod_id=0)
    return path


def config_in(folder: Path, name: str, **parallel: object) -> TrainConfig:
    config = tiny_config(
        folder / "store",
        folder / name,
        data={"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True},
        train={"train_steps": 3},
    )
    return replace(config, parallel=replace(config.parallel, **parallel))


def test_documents_stay_apart_on_every_layout(folder: Path) -> None:
    (alone,) = run_ranks(train_each, 1, [config_in(folder, "alone")])[0]
    configs = [config_in(folder, f"on-{n}", **sizes) for n, sizes in enumerate(LAYOUTS)]
    found = run_ranks(train_each, 2, configs)[0]

    tolerance = TOLERANCES["layout_loss_float32"]
    for sizes, recorder in zip(LAYOUTS, found, strict=True):
        assert recorder.losses == pytest.approx(alone.losses, rel=tolerance), sizes


def test_told_of_documents_a_run_takes_another_course(folder: Path) -> None:
    blind = tiny_config(folder / "store", folder / "blind", train={"train_steps": 3})
    (told, not_told) = run_ranks(train_each, 1, [config_in(folder, "told"), blind])[0]

    assert told.losses[0] != pytest.approx(not_told.losses[0], rel=1e-5)
