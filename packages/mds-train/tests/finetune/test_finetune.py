"""Fine-tuning starts from the checkpoint's model and its weights, and learns the answers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import MODEL, make_store, run_here, tiny_config
from family_cases import BERT, family_config, make_sentences

from mds_data import StoreWriter, open_store
from mds_train import cli
from mds_train.config.loading import build
from mds_train.data.families import collate_of, dataset_of
from mds_train.finetune.settings import settings_of_base, with_data
from mds_train.generate import load_model
from mds_train.watch import read_metrics

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and conversations without a split."""
    path = tmp_path_factory.mktemp("finetune")
    make_store(path)
    config = tiny_config(path, checkpoint={"save_interval": 6}, watch={"eval_interval": None})
    run_here(replace(config, train=replace(config.train, run_dir=str(path / "base"))))
    random = np.random.default_rng(6)
    with StoreWriter(path / "chat", vocab_size=MODEL.vocab_size, sentences=True) as writer:
        for _ in range(40):
            parts = random.integers(1, 5, 2).tolist()
            writer.add(random.integers(0, MODEL.vocab_size, sum(parts)), sentence_lengths=parts)
        writer.commit()
    return path


def test_the_model_and_the_steps_are_found(folder: Path) -> None:
    settings = settings_of_base(folder / "base", folder / "chat", folder / "tuned")

    config = build(with_data(settings, epochs=3))

    assert config.model.core().resolved() == tiny_config(folder).model.core().resolved()
    assert config.data.conversations
    assert config.data.split == "100,0,0"
    with open_store(folder / "chat") as store:
        samples = len(dataset_of(config, store, split=("100,0,0", "train"), num_samples=None))
    assert config.train.train_steps == math.ceil(3 * samples / config.train.global_batch_size)


def test_it_begins_with_the_weights_and_learns_the_answers(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "tuned"
    more = ["--train.global-batch-size", "4", "--model.hidden-dropout", "0"]
    more += ["--model.attention-dropout", "0", "--lr", "0.01", "--schedule.warmup-steps", "0"]
    arguments = ["--data", str(folder / "chat"), "--output", str(run_dir), "--epochs", "5", *more]

    assert cli.main(["finetune", str(folder / "base"), *arguments]) == 0

    losses = [entry["loss"] for entry in read_metrics(run_dir / "metrics.jsonl").train]
    assert losses[-1] < losses[0]
    assert losses[0] == pytest.approx(first_loss(folder, samples=4), rel=2e-6)


def first_loss(folder: Path, *, samples: int) -> float:
    """The mean loss of the first answers under the weights as they were."""
    settings = settings_of_base(folder / "base", folder / "chat", folder / "unused")
    config = build(with_data(settings, epochs=5))
    with open_store(folder / "chat") as store:
        dataset = dataset_of(config, store, split=("100,0,0", "train"), num_samples=samples)
        micro = collate_of(config)(dataset, list(range(samples)))
    model = load_model(folder / "base")
    with torch.no_grad():
        loss: float = model(**micro.arguments()).loss_sum.item()
    return loss / micro.counts().item()


def test_texts_are_learned_whole(folder: Path) -> None:
    settings = settings_of_base(folder / "base", folder / "store", folder / "tuned")

    config = build(with_data(settings, epochs=1))

    assert not config.data.conversations


def test_the_users_settings_win(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(folder / "chat"), "--output", str(tmp_path / "run")]
    own = ["--print-config", "--train.train-steps", "7", "--lr", "0.5", "--data.seq-length", "8"]

    assert cli.main(["finetune", str(folder / "base"), *arguments, *own]) == 0

    shown = capsys.readouterr().out
    for line in ("train_steps = 7 ", "lr = 0.5 ", "seq_length = 8 "):
        assert line in shown
    assert not (tmp_path / "run").exists()


def test_a_bert_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sentences(tmp_path)
    config = family_config(tmp_path, BERT, checkpoint={"save_interval": 1}, train={"exit_step": 1})
    run_here(config)

    arguments = ["--data", str(tmp_path / "sentences"), "--output", str(tmp_path / "tuned")]
    assert cli.main(["finetune", str(tmp_path / "run"), *arguments]) == 3

    assert "it holds a bert" in capsys.readouterr().err
