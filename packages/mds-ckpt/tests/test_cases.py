"""Small checkpoints from public bug reports, each with the right answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import case
from safetensors import safe_open

from mds_ckpt.conversion import convert
from mds_ckpt.errors import RejectedError
from mds_ckpt.formats import open_checkpoint
from mds_ckpt.formats.megatron_legacy import open_megatron
from mds_ckpt.megatron.reshard import divide_layers
from mds_ckpt.read_options import ReadOptions


def tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of everything in a safetensors file."""
    found = {}
    with safe_open(path, "numpy") as file:
        names = list(file.keys())
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    data = path.read_bytes()[8 + int.from_bytes(path.read_bytes()[:8], "little") :]
    for name in names:
        about = header[name]
        start, stop = about["data_offsets"]
        found[name] = (about["dtype"], tuple(about["shape"]), data[start:stop])
    return found


def exported(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    convert(source, target, to="hf", **options)
    return tensors(target / "model.safetensors")


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, name


@pytest.mark.parametrize("name", ["in_v0", "in_v1", "in_v3"])
def test_a01_every_order_of_fused_rows_gives_one_export(tmp_path: Path, name: str) -> None:
    found = exported(case("A01") / name, tmp_path / "hf")

    assert_same(found, tensors(case("A01") / "expected_hf.safetensors"))


def test_a01_blocks_can_be_asked_for_and_the_choice_is_said() -> None:
    path = case("A01") / "in_blocks_tp2"
    plain = open_checkpoint(case("A01") / "in_v3")

    blocks = open_megatron(path, ReadOptions(qkv_layout="thirds"))

    assert any("thirds: asked for" in note for note in blocks.notes)
    assert blocks.tensors.keys() == plain.tensors.keys()
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(blocks.tensor(name).numpy(), tensor.numpy(), err_msg=name)


def test_a03_padding_is_cut_after_the_ranks_are_joined(tmp_path: Path) -> None:
    known = exported(case("A03") / "in_with_info", tmp_path / "known")
    asked = exported(case("A03") / "in_without_info", tmp_path / "asked", vocab_size=11)

    wanted = tensors(case("A03") / "expected_hf_11.safetensors")
    assert_same(known, wanted)
    assert_same(asked, wanted)


def test_a03_an_unknown_vocabulary_is_kept_whole_and_said(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(case("A03") / "in_without_info")

    found = exported(case("A03") / "in_without_info", tmp_path / "hf")

    assert_same(found, tensors(case("A03") / "expected_hf_16.safetensors"))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 16
    assert any("all 16 rows are kept; give --vocab-size" in note for note in checkpoint.notes)


@pytest.mark.parametrize("name", ["in_no_layer_files", "in_no_zero_files", "in_bf16_prefix"])
def test_a05_every_kind_of_file_is_optional(tmp_path: Path, name: str) -> None:
    wanted = json.loads((case("A05") / "expected.json").read_text())[name]

    checkpoint = open_checkpoint(case("A05") / name)
    found = exported(case("A05") / name, tmp_path / "hf")

    assert checkpoint.config["num_layers"] == wanted["layers"]
    for degree in ("tp", "pp", "dp"):
        assert str(checkpoint.parallel[degree]) in str(wanted[degree])
    assert_same(found, tensors(case("A05") / "expected_hf.safetensors"))


def test_a07_seven_layers_are_divided_evenly_and_all_kept(tmp_path: Path) -> None:
    found = exported(case("A07") / "in", tmp_path / "hf")

    assert_same(found, tensors(case("A07") / "expected_hf.safetensors"))
    assert [list(stage) for stage in divide_layers(7, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ValueError, match=r"7 layers .* 12 pipeline stages"):
        divide_layers(7, 12)


def test_a09_foreign_objects_are_shown_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(case("A09") / "in")

    args = checkpoint.training["config"]
    assert args["position_embedding_type"] == "megatron.model.enums.PositionKind(2)"
    assert args["tok"] == "megatron.tokenizer.TokSettings"
    assert (checkpoint.config["num_layers"], checkpoint.config["hidden_size"]) == (1, 8)
    assert checkpoint.step == 10
    found = exported(case("A09") / "in", tmp_path / "hf")
    assert_same(found, tensors(case("A09") / "expected_hf.safetensors"))


@pytest.mark.parametrize("name", ["in_world3", "in_world4_two_flat_groups"])
def test_a11_padding_inside_parameters_is_left_out(name: str) -> None:
    checkpoint = open_checkpoint(case("A11") / name)

    wanted = tensors(case("A11") / "expected.safetensors")
    read = {key: tensor.numpy() for key, tensor in checkpoint.tensors.items()}
    assert read.keys() == wanted.keys()
    for key, values in wanted.items():
        assert (tuple(read[key].shape), read[key].tobytes()) == values[1:]
    assert sum(values.size for values in read.values()) == 40


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_a13_types_are_kept_bit_for_bit(tmp_path: Path, name: str) -> None:
    found = exported(case("A13") / f"in_{name}", tmp_path / "hf")

    assert_same(found, tensors(case("A13") / f"expected_{name}.safetensors"))


def test_a13_a_narrowing_that_loses_values_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(RejectedError, match=r"c_fc\.weight.*2 beyond"):
        convert(case("A13") / "in_bf16", tmp_path / "hf", to="hf", dtype="F16")

    assert not (tmp_path / "hf").exists()


def test_a16_counters_that_disagree_are_shown_and_the_engine_wins() -> None:
    checkpoint = open_checkpoint(case("A16") / "in")

    assert checkpoint.step == 120
    assert checkpoint.counters["iteration"] == 120
    assert checkpoint.counters["consumed_samples"] == 960
    said = " ".join(checkpoint.notes)
    for stored in ("global_steps 120", "iteration 100", "args.iteration 100"):
        assert stored in said
    for stored in ("global_samples 960", "args.consumed_train_samples 800"):
        assert stored in said
