"""One process: what a run leaves behind, where it starts, and what it refuses."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_cases import checkpoint_differences, make_store, run_here, tiny_config

from mds_ckpt import commit, open_checkpoint
from mds_train import TrainConfig
from mds_train.events import StepReport

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a whole run of six steps."""
    folder = tmp_path_factory.mktemp("trained")
    make_store(folder)
    run_here(tiny_config(folder, checkpoint={"save_initial": True}))
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "store", tmp_path / "store")
    return tmp_path


def elsewhere(config: TrainConfig, run_dir: Path, **changes: Any) -> TrainConfig:
    """The same run in another folder."""
    return replace(config, train=replace(config.train, run_dir=str(run_dir), **changes))


def steps_in(run_dir: Path) -> list[str]:
    return sorted(path.name for path in commit.step_folders(run_dir / "checkpoints"))


def test_a_run_reports_every_step_and_validates_on_the_same_tokens(folder: Path) -> None:
    config = elsewhere(tiny_config(folder), folder / "again")

    recorder, result = run_here(config)

    assert [step.step for step in recorder.steps] == [1, 2, 3, 4, 5, 6]
    assert recorder.steps[-1].consumed_samples == 48
    assert recorder.steps[-1].consumed_tokens == 48 * 16
    assert [(v.step, v.tokens) for v in recorder.validations] == [(3, 80), (6, 80)]
    assert recorder.starts[0].num_parameters == config.model.num_params()
    assert (result.reason, result.step) == ("done", 6)
    assert result.loss == recorder.finishes[0].loss == recorder.losses[-1]
    assert result.validation_loss == recorder.validations[-1].loss


def test_the_checkpoint_says_what_it_is(folder: Path) -> None:
    checkpoint = open_checkpoint(folder / "run" / "checkpoints" / "step-6")
    manifest = checkpoint.manifest

    assert manifest is not None
    assert manifest.counters["applied_updates"] == 6
    assert manifest.model.vocab_size == 100
    assert set(checkpoint.states) == {"weight", "exp_avg", "exp_avg_sq"}
    assert manifest.optimizer is not None
    assert manifest.optimizer["step"] == 6
    assert manifest.data is not None
    assert manifest.data["sampler"]["consumed_samples"] == 48
    decayed, undecayed = manifest.optimizer["groups"]
    assert "decoder.final_layernorm.weight" in undecayed["parameters"]
    assert "embedding.word_embeddings.weight" in decayed["parameters"]


def test_the_initial_checkpoint_holds_weights_and_starts_the_same_run(folder: Path) -> None:
    first = folder / "run" / "checkpoints" / "step-0"
    config = tiny_config(folder, checkpoint={"load": str(first)})

    recorder, _ = run_here(elsewhere(config, folder / "again"))

    assert set(open_checkpoint(first).states) == {"weight"}
    assert len(recorder.losses) == 6
    last = Path("checkpoints") / "step-6"
    assert checkpoint_differences(folder / "run" / last, folder / "again" / last) == []


def test_old_checkpoints_go_and_chosen_ones_stay(folder: Path) -> None:
    keep = {"save_interval": 1, "keep_last": 2, "keep_every": 3}
    config = elsewhere(tiny_config(folder, checkpoint=keep), folder / "again")

    run_here(config)

    assert steps_in(folder / "again") == ["step-3", "step-5", "step-6"]


def test_a_run_may_pause_and_go_on(folder: Path) -> None:
    paused = elsewhere(tiny_config(folder), folder / "again", exit_step=4)

    _, result = run_here(paused)
    recorder, _ = run_here(elsewhere(tiny_config(folder), folder / "again"), resume=True)

    assert result.reason == "exit-step"
    assert [step.step for step in recorder.steps] == [5, 6]
    assert not any("Changed since" in event.message for event in recorder.events)
    last = Path("checkpoints") / "step-6"
    assert checkpoint_differences(folder / "run" / last, folder / "again" / last) == []


def test_a_damaged_or_unfinished_checkpoint_is_passed_over_and_named(folder: Path) -> None:
    (file,) = (folder / "run" / "checkpoints" / "step-6").glob("rank-*.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-3] ^= 1
    file.write_bytes(damaged)
    for name in ("step-2.partial-0123abcd", "step-9.partial-0123abcd"):
        (folder / "run" / "checkpoints" / name).mkdir()

    recorder, _ = run_here(tiny_config(folder), resume=True)

    assert recorder.starts[0].step == 3
    passed_over = [event.message for event in recorder.events if "Passed over" in event.message]
    assert "step-9.partial-0123abcd: its save was not finished." in passed_over[0]
    assert "step-6" in passed_over[1]


def test_resuming_without_a_checkpoint_is_an_error_unless_asked_for(folder: Path) -> None:
    config = elsewhere(tiny_config(folder), folder / "nothing")

    with pytest.raises(FileNotFoundError, match="no whole checkpoint to start from"):
        run_here(config, resume=True)
    anyway = replace(config, checkpoint=replace(config.checkpoint, from_scratch_if_missing=True))
    recorder, _ = run_here(anyway, resume=True)
    assert len(recorder.losses) == 6


def test_a_run_does_not_start_over_another_one(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"another run already \(the newest is step-6"):
        run_here(tiny_config(folder))


def test_loading_from_where_nothing_is_is_an_error(folder: Path) -> None:
    config = tiny_config(folder, checkpoint={"load": str(folder / "elsewhere")})

    with pytest.raises(FileNotFoundError, match="elsewhere: there is no whole checkpoint"):
        run_here(elsewhere(config, folder / "again"))


def test_another_schedule_needs_the_override(folder: Path) -> None:
    config = tiny_config(folder, optimizer={"lr": 5e-3}, train={"train_steps": 8})

    with pytest.raises(ValueError, match=r"max_lr 0.01 -> 0.005; decay_steps 6 -> 8.*override"):
        run_here(config, resume=True)
    override = replace(config, schedule=replace(config.schedule, override=True))
    recorder, _ = run_here(override, resume=True)

    # The cosine of the new run after 6 and 7 of 8 updates, not a mixture with the old one.
    assert recorder.steps[0].lr == pytest.approx(1e-3 + 0.25 * 4e-3)
    assert recorder.steps[0].step == 7


def test_weights_alone_begin_a_new_run(folder: Path) -> None:
    last = folder / "run" / "checkpoints" / "step-6"
    tune = {"load": str(last), "load_weights_only": True, "save_initial": True}
    config = elsewhere(
        tiny_config(folder, checkpoint=tune, schedule={"warmup_steps": 1}), folder / "tuned"
    )

    recorder, result = run_here(config)

    assert recorder.steps[0].step == 1
    assert recorder.steps[0].lr == 0.0
    start = open_checkpoint(folder / "tuned" / "checkpoints" / "step-0")
    for name, tensor in open_checkpoint(last).tensors.items():
        assert (tensor.numpy() == start.tensor(name).numpy()).all()
    assert start.manifest is not None
    assert start.manifest.parent is not None
    assert start.manifest.parent["path"] == str(last)
    assert result.reason == "done"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"seed": 8}}, "train.seed 7 -> 8"),
        ({"data": {"seq_length": 8}}, "data.seq_length 16 -> 8"),
    ],
)
def test_another_order_of_the_data_is_not_the_same_run(
    folder: Path, changes: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_here(tiny_config(folder, **changes), resume=True)


def test_a_checkpoint_of_another_model_is_refused(folder: Path) -> None:
    other = replace(tiny_config(folder).model, hidden_size=64)

    with pytest.raises(ValueError, match=r"has the shape \(.*32.*\) there and \(.*64"):
        run_here(tiny_config(folder, model=other), resume=True)


def test_a_vocabulary_that_is_too_small_is_refused(folder: Path) -> None:
    other = replace(tiny_config(folder).model, vocab_size=90)

    with pytest.raises(ValueError, match=r"vocabulary of 100 tokens, but model\.vocab_size is 90"):
        run_here(elsewhere(tiny_config(folder, model=other), folder / "again"))


def test_a_full_disk_leaves_the_earlier_checkpoints_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mds_train.save.write_pieces", full)
    config = tiny_config(folder, train={"train_steps": 8}, schedule={"override": True})

    with pytest.raises(OSError, match="No space left"):
        run_here(config, resume=True)

    left = {path.name for path in (folder / "run" / "checkpoints").iterdir()}
    assert left == {"step-0", "step-3", "step-6", "latest", ".mds-lock"}
    assert (folder / "run" / "checkpoints" / "latest").read_text() == "step-6\n"


def test_masters_that_do_not_belong_to_the_weights_are_not_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mds_train.engines.deepspeed import DeepSpeedEngine

    plain = DeepSpeedEngine.fragments

    def shifted(self: DeepSpeedEngine) -> list[Any]:
        first, *rest = plain(self)
        return [replace(first, master=first.master + 1), *rest]

    monkeypatch.setattr(DeepSpeedEngine, "fragments", shifted)

    with pytest.raises(RuntimeError, match="master weights do not belong to the model's"):
        run_here(elsewhere(tiny_config(folder), folder / "again"))
    assert not list((folder / "again" / "checkpoints").glob("step-*"))


def test_micro_batches_do_not_change_the_training(folder: Path) -> None:
    """Gradient accumulation is one big batch: losses, norms, learning rates."""

    def steps(micro_batch_size: int) -> list[StepReport]:
        config = tiny_config(folder, train={"micro_batch_size": micro_batch_size})
        return run_here(elsewhere(config, folder / f"micro-{micro_batch_size}"))[0].steps

    whole, cut = steps(8), steps(2)

    assert [s.loss for s in cut] == pytest.approx([s.loss for s in whole], rel=2e-6)
    assert [s.grad_norm for s in cut] == pytest.approx([s.grad_norm for s in whole], rel=1e-5)
    assert [s.lr for s in cut] == [s.lr for s in whole]
