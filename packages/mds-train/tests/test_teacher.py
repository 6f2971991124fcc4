"""A run with a teacher has the loss that torch computes from both models' logits, until it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import MODEL, checkpoint_differences, make_store, run_here, tiny_config
from torch.nn import functional as F

from mds_core import ProcessGroups
from mds_core.models import GPT
from mds_data import open_store
from mds_train import TrainConfig
from mds_train.batches import collate
from mds_train.config import DistillConfig
from mds_train.config.megatron_flags import take_old_flags
from mds_train.data.families import dataset_of
from mds_train.generate import load_model

pytestmark = pytest.mark.timeout(120)

STUDENT = replace(MODEL, hidden_dropout=0.0, attention_dropout=0.0)
TEACHER = replace(STUDENT, num_layers=1, hidden_size=48, num_attention_heads=2)
ALPHA, BETA, TEMPERATURE = 0.6, 0.8, 1.7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store and a teacher that has seen it."""
    path = tmp_path_factory.mktemp("teacher")
    make_store(path)
    config = tiny_config(path, model=TEACHER)
    run_here(replace(config, train=replace(config.train, run_dir=str(path / "teacher"))))
    return path


def config_in(folder: Path, name: str, **distill: Any) -> TrainConfig:
    config = tiny_config(folder, model=STUDENT, train={"train_steps": 4})
    values = {"alpha": ALPHA, "beta": BETA, "temperature": TEMPERATURE, **distill}
    return replace(
        config,
        train=replace(config.train, run_dir=str(folder / name)),
        distill=DistillConfig(teacher=str(folder / "teacher"), **values),
    )


def expected_terms(config: TrainConfig, folder: Path) -> tuple[float, float]:
    """Of the first step, by torch's own functions on whole logits."""
    size = config.train.global_batch_size
    with open_store(folder / "store") as store:
        samples = size * config.train.train_steps
        dataset = dataset_of(config, store, split="train", num_samples=samples)
        batch = collate(dataset, list(range(size)))
    student = GPT(STUDENT.core(), ProcessGroups.single(), seed=config.train.seed)
    with torch.no_grad():
        ours, theirs = (model(batch.tokens) for model in (student, load_model(folder / "teacher")))
    text = F.cross_entropy(ours.flatten(0, 1), batch.labels.flatten())
    softened = (ours / TEMPERATURE).log_softmax(-1), (theirs / TEMPERATURE).softmax(-1)
    apart = F.kl_div(*softened, reduction="batchmean") / config.data.seq_length
    return ALPHA * text.item(), BETA * TEMPERATURE**2 * apart.item()


def test_the_loss_is_that_of_the_original(folder: Path) -> None:
    config = config_in(folder, "student")

    recorder, _ = run_here(config)

    first = recorder.steps[0]
    text, apart = expected_terms(config, folder)
    assert apart > 1e-4
    assert first.loss_terms == pytest.approx({"text": text, "teacher": apart}, rel=2e-5)
    assert first.loss == pytest.approx(text + apart, rel=2e-6)
    assert recorder.steps[-1].loss_terms["teacher"] < apart
    plain = [validation.loss_terms["teacher"] for validation in recorder.validations]
    assert plain == [0.0] * len(plain)


def test_it_resumes_bitwise_and_without_the_teacher_after_its_last_step(folder: Path) -> None:
    staged = config_in(folder, "staged", until_step=2)
    whole, _ = run_here(staged)
    halves = config_in(folder, "halves", until_step=2)
    run_here(replace(halves, train=replace(halves.train, exit_step=1)))

    rest, _ = run_here(halves, resume=True)

    assert [step.loss_terms["teacher"] > 0 for step in whole.steps] == [True, True, False, False]
    assert rest.losses == whole.losses[1:]
    ends = [Path(run.train.run_dir) / "checkpoints" / "step-4" for run in (staged, halves)]
    assert checkpoint_differences(*ends) == []


def test_the_flags_of_the_original_set_it(caplog: pytest.LogCaptureFixture) -> None:
    shape = ["--num-layers-teacher", "12", "--hidden-size-teacher", "64"]
    loss = ["--kd-alpha-ce", "1", "--kd-beta-ce", "0.5", "--kd-temp", "2"]

    old, rest = take_old_flags(["--kd", "--mos", "--load-teacher", "there", *loss, *shape])

    assert not rest
    found = {key: setting.value for key, setting in old.settings.items()}
    assert found == {
        "distill.teacher": "there",
        "distill.alpha": 1.0,
        "distill.beta": 0.5,
        "distill.temperature": 2.0,
    }
    assert "the teacher's shape is read from its checkpoint" in caplog.text


def test_what_cannot_be_compared_is_refused(folder: Path) -> None:
    config = config_in(folder, "other")
    other = replace(config, model=replace(STUDENT, vocab_size=120))

    with pytest.raises(ValueError, match="the teacher has 100 words"):
        run_here(other)
    with pytest.raises(ValueError, match=r"\[distill\]: the temperature is 0"):
        DistillConfig(temperature=0.0)
