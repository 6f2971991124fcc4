"""What a dry run says of layouts that no test machine has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mds_data import write_store
from mds_train import cli

TOML = """
[model]
num_layers = 4
hidden_size = 32
num_attention_heads = 4
vocab_size = 64
max_position_embeddings = 16
[data]
store = "store"
seq_length = 16
split = "100,0,0"
[train]
run_dir = "run"
train_steps = 2
global_batch_size = 256
device = "cpu"
[parallel]
tp_size = 4
pp_size = 2
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    documents = [np.arange(1, 60) for _ in range(8)]
    write_store(tmp_path / "store", documents, vocab_size=64, eod_id=0)
    (tmp_path / "run.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_thousand_ranks_are_checked_by_one_process(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "run.toml", "--dry-run", "--ranks", "1024"]) == 0

    assert "1024 ranks: tp 4, pp 2 (1f1b), dp 128" in capsys.readouterr().out
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--dry-run", "--ranks", "1000"], 3, "not a multiple of train.micro_batch_size 1 * 125"),
        (["--dry-run", "--ranks", "0"], 2, "--ranks is 0, but it must be at least 1."),
        (["--ranks", "8"], 2, "--ranks says how many a --dry-run is for"),
    ],
)
@pytest.mark.usefixtures("place")
def test_what_would_not_start_is_said(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "run.toml", *arguments]) == code

    assert words in capsys.readouterr().err
