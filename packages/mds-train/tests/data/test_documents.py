"""Conversations, and documents that do not see each other: what is learned, and equal to what."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import MODEL, run_here, tiny_config

from mds_core import ProcessGroups
from mds_data import StoreWriter
from mds_train.config import TrainConfig
from mds_train.data.building import open_stores, training_samples
from mds_train.data.documents import DocumentBatch
from mds_train.data.families import collate_of
from mds_train.model_building import build_undivided

END = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of prompts and answers that each end with a mark."""
    path = tmp_path_factory.mktemp("conversations")
    random = np.random.default_rng(5)
    with StoreWriter(
        path / "store", vocab_size=MODEL.vocab_size, eod_id=END, sentences=True, split="80,20,0"
    ) as writer:
        for _ in range(60):
            parts = random.integers(1, 5, 2 * random.integers(1, 3)).tolist()
            ids = random.integers(2, MODEL.vocab_size, sum(parts))
            ids[-1] = END
            writer.add(ids, sentence_lengths=parts)
        writer.commit()
    return path


def conversation_config(folder: Path, **data: Any) -> TrainConfig:
    return tiny_config(folder, data={"conversations": True, **data})


def micro_batch(config: TrainConfig, numbers: list[int]) -> Any:
    return collate_of(config)(training_samples(config, open_stores(config)), numbers)


def losses_alone(config: TrainConfig, micro: DocumentBatch) -> float:
    """The counted losses of every document of a micro batch, each run by itself."""
    model = build_undivided(config, ProcessGroups.single(), device="cpu").eval()
    flat = [getattr(micro, name).flatten() for name in ("tokens", "labels", "loss_mask")]
    total = 0.0
    bounds = micro.cumulative_lengths.tolist()
    for start, stop in pairwise(bounds):
        tokens, labels, mask = (values[start:stop][None] for values in flat)
        total += model(tokens, labels, loss_mask=mask).loss_sum.item()
    return total


@pytest.mark.parametrize(
    "data",
    [
        {"conversations": True},
        {"conversations": True, "learn_prompts": True},
        {"reset_attention_mask": True, "reset_position_ids": True},
    ],
    ids=["answers", "prompts", "texts"],
)
def test_no_document_of_a_sample_sees_another(folder: Path, data: dict[str, Any]) -> None:
    config = tiny_config(folder, data=data)
    micro = micro_batch(config, [0, 1, 2])

    model = build_undivided(config, ProcessGroups.single(), device="cpu").eval()
    with torch.no_grad():
        together = model(**micro.arguments()).loss_sum.item()

    assert isinstance(micro, DocumentBatch)
    assert len(micro.cumulative_lengths) > 4, "several documents a sample"
    assert together == pytest.approx(losses_alone(config, micro), rel=2e-6)
    # Told nothing of documents, the loss is another one.
    blind = {key: value for key, value in micro.arguments().items() if "cumulative" not in key}
    assert model(**blind).loss_sum.item() != pytest.approx(together, rel=1e-5)


def test_answers_are_learned_and_prompts_only_if_asked_for(folder: Path) -> None:
    answers = micro_batch(conversation_config(folder), [0, 1])
    everything = micro_batch(conversation_config(folder, learn_prompts=True), [0, 1])

    assert torch.equal(answers.tokens, everything.tokens)
    assert 0 < answers.counts().item() < everything.counts().item() < answers.tokens.numel() + 1


def test_unpacked_conversations_stand_alone(folder: Path) -> None:
    micro = micro_batch(conversation_config(folder, packing=False), [0, 1])

    assert "cumulative_lengths" not in micro.arguments()
    assert (micro.tokens[:, -1] == END).all(), "filled up with the mark of an end"


def test_nothing_is_learned_after_an_end_if_so_asked(folder: Path) -> None:
    plain = micro_batch(tiny_config(folder), [0, 1])
    masked = micro_batch(tiny_config(folder, data={"eod_mask_loss": True}), [0, 1])

    ends = (plain.tokens == END).sum().item()
    assert ends > 0
    assert plain.counts().item() - masked.counts().item() == ends


def test_a_run_on_conversations_learns_and_goes_on_as_if_it_had_not_stopped(
    folder: Path, tmp_path: Path
) -> None:
    config = conversation_config(folder)
    whole = replace(config, train=replace(config.train, run_dir=str(tmp_path / "whole")))
    parts = replace(config, train=replace(config.train, run_dir=str(tmp_path / "parts")))

    straight, _ = run_here(whole)
    run_here(replace(parts, train=replace(parts.train, exit_step=3)))
    resumed, _ = run_here(parts, resume=True)

    assert straight.losses[3:] == resumed.losses
    assert straight.losses[-1] < straight.losses[0]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"reset_attention_mask": True}}, "leave data.reset_attention_mask out"),
        ({"data": {"conversations": False, "learn_prompts": True}}, "needs data.conversations"),
        ({"data": {"conversations": False, "packing": False}}, "about data.conversations"),
        ({"data": {"curriculum_start_length": 8, "curriculum_steps": 2}}, "data.packing"),
    ],
)
def test_what_does_not_go_together_is_said(
    folder: Path, tables: dict[str, dict[str, Any]], words: str
) -> None:
    config = conversation_config(folder)

    with pytest.raises(ValueError, match=words):
        replace(
            config,
            **{name: replace(getattr(config, name), **values) for name, values in tables.items()},
        )
