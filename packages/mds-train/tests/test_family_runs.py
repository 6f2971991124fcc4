"""BERTs and encoders with decoders train as a plain loop of torch does, and resume bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_cases import Recorder, checkpoint_differences, run_here
from family_cases import BERT, ONE_HEAD, T5, family_config, make_pairs, make_sentences
from torch import Tensor, nn
from torch.nn import functional as F

from mds_core.groups import ProcessGroups
from mds_data import BertDataset, NMTDataset, T5Dataset, open_store
from mds_train import TrainConfig, TrainResult
from mds_train.config import ModelConfig
from mds_train.errors import InputError
from mds_train.generate import load_model
from mds_train.model_building import build_undivided

pytestmark = pytest.mark.timeout(120)

STILL = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


class Kind(NamedTuple):
    model: ModelConfig
    pairs: bool = False


KINDS = {
    "bert": Kind(BERT),
    "bert with one head": Kind(ONE_HEAD),
    "t5": Kind(T5),
    "translation": Kind(T5, pairs=True),
}
kinds = pytest.mark.parametrize("name", KINDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    make_sentences(path)
    make_pairs(path)
    return path


def config_of(name: str, folder: Path, **changes: dict[str, Any]) -> TrainConfig:
    kind = KINDS[name]
    run_dir = {"run_dir": str(folder / name.replace(" ", "-"))}
    changes = {**changes, "train": run_dir | changes.get("train", {})}
    return family_config(folder, kind.model, pairs=kind.pairs, **changes)


@pytest.fixture(scope="module")
def straight(folder: Path) -> Mapping[str, tuple[Recorder, TrainResult]]:
    """A run of each kind with dropout, with checkpoints 3 and 6."""
    return {name: run_here(config_of(name, folder)) for name in KINDS}


@kinds
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    name: str, folder: Path, straight: Mapping[str, tuple[Recorder, TrainResult]]
) -> None:
    whole, result = straight[name]
    resumed = folder / f"resumed {name}"
    shutil.copytree(result.run_dir / "checkpoints/step-3", resumed / "checkpoints/step-3")

    rest, end = run_here(config_of(name, folder, train={"run_dir": str(resumed)}), resume=True)

    assert rest.losses == whole.losses[3:]
    assert [step.loss_terms for step in rest.steps] == [s.loss_terms for s in whole.steps[3:]]
    assert rest.validations[-1].loss == whole.validations[-1].loss
    assert result.checkpoint is not None
    assert end.checkpoint is not None
    assert checkpoint_differences(result.checkpoint, end.checkpoint) == []


def test_the_terms_of_a_bert_s_loss_are_told_and_add_up(
    straight: Mapping[str, tuple[Recorder, TrainResult]],
) -> None:
    run = straight["bert"][0]

    for report in (*run.steps, *run.validations):
        assert set(report.loss_terms) == {"words", "binary"}
        assert sum(report.loss_terms.values()) == pytest.approx(report.loss, rel=1e-12)
    assert straight["t5"][0].steps[0].loss_terms == {}
    tokens = straight["t5"][0].steps[0].consumed_tokens
    assert tokens == 8 * (24 + 16)


@kinds
def test_losses_are_those_of_a_plain_loop_over_whole_batches(name: str, folder: Path) -> None:
    still = replace(KINDS[name].model, **STILL)
    config = config_of(
        name,
        folder,
        train={"run_dir": str(folder / f"still {name}"), "train_steps": 4},
        schedule={"kind": "constant", "warmup_steps": 0, "min_lr": 0.0},
        checkpoint={"save_interval": None, "save_final": False},
        watch={"eval_interval": None},
    )
    config = replace(config, model=still)

    found, _ = run_here(config)

    assert found.losses == pytest.approx(plain_losses(config), rel=1e-6)


def plain_losses(config: TrainConfig) -> list[float]:
    """One process, the global batch at once, torch's own losses and AdamW."""
    model = build_undivided(config, ProcessGroups.single(), device="cpu")
    optimizer = plain_optimizer(model, config)
    dataset = plain_dataset(config)
    losses = []
    for step in range(config.train.train_steps):
        samples = [dataset[number] for number in range(8 * step, 8 * step + 8)]
        loss = plain_loss(model, {key: stack(samples, key) for key in samples[0]})
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    own, optimizer = list(model.parameters()), config.optimizer
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0},
    ]
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, eps=optimizer.eps)


def plain_dataset(config: TrainConfig) -> Any:
    store, model = open_store(Path(config.data.paths[0])), config.model
    sizes = {"seq_length": 24, "seed": config.train.seed, "split": "train", "num_samples": 48}
    if model.family == "bert":
        segments = "one" if model.binary_head is False else "order"
        return BertDataset(store, segments=segments, **sizes)
    kind = NMTDataset if config.data.pairs else T5Dataset
    return kind(store, decoder_seq_length=16, **sizes)


def stack(samples: list[Mapping[str, Any]], key: str) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(sample[key]) for sample in samples]))


def plain_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    if "encoder_tokens" in batch:
        logits = model(
            batch["encoder_tokens"],
            batch["decoder_tokens"],
            padding_mask=batch["encoder_padding_mask"],
        )
        return mean_loss(logits, batch)
    output = model(
        batch["tokens"], token_types=batch["token_types"], padding_mask=batch["padding_mask"]
    )
    words = mean_loss(output.words, batch)
    if output.binary is None:
        return words
    return words + F.cross_entropy(output.binary, batch["is_random"])


def mean_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-1)


def test_a_bert_is_asked_in_vain_to_continue_a_text(
    straight: Mapping[str, tuple[Recorder, TrainResult]],
) -> None:
    with pytest.raises(InputError, match="it holds a bert, which does not continue a text"):
        load_model(straight["bert"][1].run_dir)


def test_a_run_with_other_masks_is_not_resumed(
    folder: Path, straight: Mapping[str, tuple[Recorder, TrainResult]]
) -> None:
    del straight  # has written the checkpoints
    other = config_of("bert", folder, data={"mask_probability": 0.3})

    with pytest.raises(ValueError, match=r"data\.mask_probability 0\.15 -> 0\.3"):
        run_here(other, resume=True)
