"""Comparing checkpoints by canonical name."""

from __future__ import annotations

from pathlib import Path

import ckpt_samples as samples
import ml_dtypes
import numpy as np
import pytest

from mds_ckpt import compare, convert, open_checkpoint
from mds_ckpt.diff import number_difference

MODEL = samples.model("llama")


def test_formats_do_not_matter_and_states_of_one_side_are_noted(tmp_path: Path) -> None:
    source = samples.save(tmp_path / "a", MODEL, samples.arrays(MODEL), optimizer=True)
    convert(source, tmp_path / "hf", to="hf")

    found = compare(open_checkpoint(source), open_checkpoint(tmp_path / "hf"))

    assert not found.differences
    assert found.num_compared == len(samples.arrays(MODEL))
    assert "holds exp_avg" in found.notes[0]


def test_a_changed_number_is_named_with_its_place(tmp_path: Path) -> None:
    weights = samples.arrays(MODEL)
    first = samples.save(tmp_path / "a", MODEL, weights)
    weights["output_layer.weight"][3, 5] += 0.5
    second = samples.save(tmp_path / "b", MODEL, weights)

    found = compare(open_checkpoint(first), open_checkpoint(second))

    (difference,) = found.differences
    assert difference.tensor == "output_layer.weight"
    assert difference.reason.startswith("1 of 592 numbers differ, most at [3, 5] by 0.5")
    assert not compare(open_checkpoint(first), open_checkpoint(second), atol=0.6).differences


def test_other_shapes_and_missing_tensors_are_differences(tmp_path: Path) -> None:
    first = samples.save(tmp_path / "a", MODEL, samples.arrays(MODEL))
    other = samples.model("llama", ffn_hidden_size=20, tie_embeddings=True)
    second = samples.save(tmp_path / "b", other, samples.arrays(other))

    found = compare(open_checkpoint(first), open_checkpoint(second))

    reasons = {difference.tensor: difference.reason for difference in found.differences}
    assert reasons["output_layer.weight"].startswith("only in")
    assert reasons["decoder.layers.0.mlp.linear_fc1.weight"] == "shape [48, 16] against [40, 16]"


def test_types_are_noted_and_numbers_compared(tmp_path: Path) -> None:
    weights = samples.arrays(MODEL, dtype=ml_dtypes.bfloat16)
    first = samples.save(tmp_path / "a", MODEL, weights)
    wide = {name: array.astype(np.float32) for name, array in weights.items()}
    second = samples.save(tmp_path / "b", MODEL, wide)

    found = compare(open_checkpoint(first), open_checkpoint(second))

    assert not found.differences
    assert "different types" in found.notes[0]


@pytest.mark.parametrize(
    ("a", "b", "options", "expected"),
    [
        ([1.0, np.nan], [1.0, np.nan], {}, None),
        ([np.inf], [np.inf], {}, None),
        ([np.inf], [-np.inf], {"atol": 9.0}, "by inf"),
        ([np.nan], [1.0], {"atol": 9.0}, "by inf"),
        ([0.0], [-0.0], {}, None),
        ([100.0], [101.0], {"rtol": 0.01}, None),
        ([100.0], [102.0], {"rtol": 0.01}, "1 of 1 numbers differ"),
        ([], [], {}, None),
    ],
)
def test_equality_of_numbers(
    a: list[float], b: list[float], options: dict[str, float], expected: str | None
) -> None:
    found = number_difference(np.array(a), np.array(b), **{"atol": 0.0, "rtol": 0.0} | options)

    assert found is None if expected is None else expected in str(found)
