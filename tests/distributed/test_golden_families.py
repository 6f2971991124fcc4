"""The losses that Megatron-DeepSpeed recorded for its BERT and T5, from its own arguments and data.

Its weights are recorded after step 10, with Adam's moments; the update is undone exactly, and the
loss of step 10 is computed on the samples that our import of its arguments reads.

Its T5 hands the mask of its cross-attention over in the place of another argument, so its decoder
sees the encoder's padding too, whose positions see all others evenly. Ours masks; here it is made
to see as the original does. And torch's Adam took the steps, which adds weight decay to the
gradient: the moments hold it, and no decay apart is undone.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mds_ckpt import open_checkpoint
from mds_ckpt.read_options import ReadOptions
from mds_core.groups import ProcessGroups
from mds_kernels.testing import TOLERANCES
from mds_train.config import TrainConfig
from mds_train.config.loading import build
from mds_train.data.building import open_stores, training_samples
from mds_train.data.families import collate_of
from mds_train.migration.importing import import_arguments
from mds_train.model_building import build_undivided
from mds_train.schedule import Schedule

STEP, BATCH, MICRO_BATCH = 10, 4, 2
TERMS = {"bert": ("lm loss", "sop loss"), "t5": ("lm loss",)}
WITHIN = TOLERANCES["golden_loss_float32"]


def imported_config(folder: Path, argv: list[str], *, golden: Path) -> TrainConfig:
    """The original's arguments in our words; its data lie elsewhere here."""
    here = {
        f"/data/mdsrun/data/{path.stem}": str(path.with_suffix(""))
        for path in (golden / "datasets").glob("*.bin")
    }
    vocabulary = golden / "datasets" / "bertwp-vocab.txt"
    words = [here.get(word, word) for word in argv]
    words = [str(vocabulary) if word.endswith("bertwp-vocab.txt") else word for word in words]
    imported = import_arguments(words, name=str(folder))
    assert (imported.missing, imported.left_out) == ([], [])
    config = build(imported.settings)
    # --no-bias-gelu-fusion is the exact GELU; the padded rows take part in the original's softmax.
    return replace(config, model=replace(config.model, legacy_vocab_softmax=True))


def weights_before_the_step(config: TrainConfig, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Undo the last update of Adam, in float64."""
    rows = config.model.padded_vocab_size()
    stored = open_checkpoint(checkpoint, options=ReadOptions(vocab_size=rows))
    lr, optimizer = Schedule.from_config(config).learning_rate(STEP - 1), config.optimizer
    found = {}
    for name, tensor in stored.tensors.items():
        weight, moment, square = (
            each.numpy().astype(np.float64)
            for each in (tensor, stored.tensor(name, "exp_avg"), stored.tensor(name, "exp_avg_sq"))
        )
        moment /= 1 - optimizer.beta1**STEP
        square /= 1 - optimizer.beta2**STEP
        before = weight + lr * moment / (np.sqrt(square) + optimizer.eps)
        found[name] = torch.from_numpy(before)
    return found


def seen_as_in_the_original(
    padding_mask: torch.Tensor, *, length: int, queries: int, **_: object
) -> torch.Tensor:
    """Added to the scores: nothing in the cross-attention; in the encoder so much, where one of the
    two is padding, that a position which sees nothing sees all others evenly."""
    tokens = padding_mask.bool()
    if queries != length:
        return torch.zeros(len(tokens), 1, queries, length, dtype=torch.float64)
    both = tokens[:, None, :, None] & tokens[:, None, None, :]
    return torch.where(both, 0.0, -1e30).double()


@pytest.mark.parametrize("family", TERMS)
def test_the_loss_of_a_recorded_step(
    family: str, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mds_core.models.t5._seen", seen_as_in_the_original)
    folder = golden / f"{family}_tp1_legacy_fp32"
    recorded: dict[str, Any] = json.loads((folder / "expected.json").read_text())
    config = imported_config(folder, recorded["argv"], golden=golden)
    model = build_undivided(config, ProcessGroups.single(), device="cpu")
    before = weights_before_the_step(config, folder / "ckpt")
    assert model.load_state_dict(before, strict=True)
    dataset, collate = training_samples(config, open_stores(config)), collate_of(config)

    means = []
    for first in range((STEP - 1) * BATCH, STEP * BATCH, MICRO_BATCH):
        micro = collate(dataset, range(first, first + MICRO_BATCH))
        with torch.no_grad():
            means.append(micro.sums(model(**micro.arguments())) / micro.counts())

    # The original's loss is the mean over the micro batches of the means over each.
    found = torch.stack(means).mean(0).tolist()
    expected = [recorded["steps"][STEP - 1]["loss"][term] for term in TERMS[family]]
    assert found == pytest.approx(expected, rel=WITHIN)
