"""What inspect shows: a stable schema, a tree, statistics."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
import safetensors_attacks as attacks
from rich.console import Console

from mds_ckpt import open_checkpoint
from mds_ckpt.inspection import statistics, summary
from mds_ckpt.inspection_tree import draw, size

MODEL = samples.model("llama", num_layers=12)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return samples.save(tmp_path / "ckpt", MODEL, samples.arrays(MODEL), optimizer=True)


def drawn(found: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(draw(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_schema_is_stable(folder: Path) -> None:
    found = summary(open_checkpoint(folder))

    assert list(found) == [
        "schema",
        "path",
        "format",
        "title",
        "step",
        "counters",
        "model",
        "parallel",
        "num_params",
        "states",
        "files",
        "companions",
        "producer",
        "created",
        "notes",
        "problems",
        "tensors",
    ]
    assert found["schema"] == "mds-ckpt/inspect/1"
    assert found["tensors"][0] == {
        "name": "embedding.word_embeddings.weight",
        "shape": [37, 16],
        "dtype": "F32",
        "bytes": 2 * 37 * 16 * 4,
        "states": {"weight": "F32", "exp_avg": "F32"},
    }
    assert found["num_params"] == sum(a.size for a in samples.arrays(MODEL).values())


def test_equal_layers_stand_once_in_the_tree(folder: Path) -> None:
    text = drawn(summary(open_checkpoint(folder)))

    assert text.count("linear_qkv.weight  F32 [64, 16]") == 1
    assert "layers.0-11" in text
    assert "12 layers, 16 hidden, 4 heads, 2 key/value heads" in text
    assert "nothing is missing" in text


def test_what_is_missing_is_shown(folder: Path) -> None:
    (folder / "rank-00001.safetensors").unlink()
    (folder / "rank-00000.safetensors").write_bytes(b"short")

    text = drawn(summary(open_checkpoint(folder)))

    assert "problem  rank-00001.safetensors: there is no such file" in text
    assert "problem  rank-00000.safetensors: it has 5 bytes where the manifest says" in text


def test_a_pattern_picks_tensors(folder: Path) -> None:
    found = summary(open_checkpoint(folder), pattern="*layers.1*.linear_fc2.weight")

    names = [tensor["name"].split(".")[2] for tensor in found["tensors"]]
    assert names == ["1", "10", "11"]


def test_statistics_agree_with_numpy_and_count_what_is_not_finite() -> None:
    array = np.random.default_rng(0).standard_normal((1500, 1000)).astype("f4")
    found = statistics(array)
    assert found["norm"] == pytest.approx(math.sqrt((array.astype("f8") ** 2).sum()), rel=1e-12)
    assert (found["min"], found["max"]) == (array.min(), array.max())
    assert found["mean"] == pytest.approx(array.astype("f8").mean())

    odd = np.array([np.nan, np.inf, -np.inf, 0.0, 2.0], dtype="f2")
    assert statistics(odd) == {
        "norm": 2,
        "min": 0,
        "max": 2,
        "mean": 1,
        "nan": 1,
        "inf": 2,
        "zero": 1,
    }
    empty = statistics(np.zeros(0))
    assert (empty["min"], empty["max"], empty["mean"]) == (None, None, None)


def test_ugly_names_are_drawn_escaped(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(attacks.ugly())

    text = drawn(summary(open_checkpoint(path)))

    assert "\\x1b]0;pwn\\x07" in text
    assert "\\u202e" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_very_many_tensors_are_drawn_in_part(tmp_path: Path) -> None:
    names = [f"t{i}x" for i in range(5000)]
    members = {name: attacks.tensor("U8", (0,), (0, 0)) for name in names}
    path = tmp_path / "x.safetensors"
    path.write_bytes(attacks.file(members))

    assert "and 3,000 more; pick some with --tensor" in drawn(summary(open_checkpoint(path)))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 KB"), (4e9, "4.0 GB"), (7e15, "7000.0 TB")],
)
def test_sizes_are_in_units_people_read(nbytes: float, text: str) -> None:
    assert size(nbytes) == text
