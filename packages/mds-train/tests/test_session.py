from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import pytest
from rich.console import Console

from mds_ckpt import commit
from mds_train.config.loading import build
from mds_train.errors import InputError
from mds_train.launch import Environment
from mds_train.session import (
    check_new_run,
    check_store,
    perform,
    settings_of_new_run,
    settings_of_resumed_run,
)

TINY = """\
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = 64
max_position_embeddings = 16
[data]
store = "store"
seq_length = 16
[train]
run_dir = "run"
train_steps = 4
global_batch_size = 2
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def test_the_command_line_wins_over_variables_and_these_over_the_file(file: Path) -> None:
    environment = Environment(
        settings={"MDS_TRAIN__TRAIN_STEPS": "5", "MDS_TRAIN__SEED": "6", "MDS_OPTIMIZER__LR": "0.1"}
    )
    arguments = ["--train.seed", "7", "--lr", "0.2", "--eval-iters", "3"]

    settings = settings_of_new_run(file, arguments, environment=environment, prog="mds-train")

    origins = {key: item.origin for key, item in settings.items()}
    assert build(settings).train.train_steps == 5
    assert origins["train.train_steps"] == "environment MDS_TRAIN__TRAIN_STEPS"
    assert (settings["train.seed"].value, origins["train.seed"]) == (7, "command line --train.seed")
    assert (settings["optimizer.lr"].value, origins["optimizer.lr"]) == (0.2, "command line --lr")
    assert settings["watch.eval_samples"].value == 6
    assert origins["model.num_layers"] == str(file)


def test_paths_become_absolute_so_that_a_run_resumes_from_anywhere(
    file: Path, tmp_path: Path
) -> None:
    settings = settings_of_new_run(file, [], environment=Environment(), prog="mds-train")

    assert settings["data.store"].value == str(tmp_path / "store")
    assert settings["train.run_dir"].value == str(tmp_path / "run")


def test_a_resumed_run_reads_its_own_configuration_wherever_it_was_moved(
    file: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    file.rename(moved / "config.toml")

    settings = settings_of_resumed_run(
        moved, ["--parallel.tp-size", "2"], environment=Environment(), prog="mds-train"
    )

    config = build(settings)
    assert config.train.run_dir == str(moved)
    assert config.parallel.tp_size == 2


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for folder, message in ((tmp_path / "nowhere", "no such run"), (tmp_path, "no config.toml")):
        with pytest.raises(InputError, match=message):
            settings_of_resumed_run(folder, [], environment=Environment(), prog="mds-train")


def test_a_run_is_not_started_over_another(file: Path, tmp_path: Path) -> None:
    config = build(settings_of_new_run(file, [], environment=Environment(), prog="mds-train"))
    check_new_run(config)  # an empty folder is fine

    (tmp_path / "run/checkpoints/step-3").mkdir(parents=True)

    with pytest.raises(InputError, match=r"step-3\); go on with `mds-train resume .*/run`"):
        check_new_run(config)


def test_a_missing_store_is_named_before_anything_starts(file: Path, tmp_path: Path) -> None:
    config = build(settings_of_new_run(file, [], environment=Environment(), prog="mds-train"))
    with pytest.raises(InputError, match=r"/store: there is no such token store \(data\.store\)"):
        check_store(config)

    (tmp_path / "store.idx").touch()  # a Megatron pair is named by its prefix

    check_store(config)


def test_a_full_disk_leaves_no_half_written_configuration_and_is_located(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of_new_run(file, [], environment=Environment(), prog="mds-train")

    def full(_: commit.FileOperations, file: BinaryIO, data: memoryview) -> None:
        file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(commit.FileOperations, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        perform(settings, environment=Environment(), console=Console(), resume=False)

    assert caught.value.filename == str(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]
