"""Weights written for Megatron-core: stacked layers, a DCP index, digests, stored arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ckpt_samples import FAMILIES, arrays, model, save
from golden import fixture

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.formats.torch_dist.metadata import read_metadata
from mds_ckpt.verification import verify
from mds_ckpt.writers import torch_dist


@pytest.mark.parametrize(
    "name",
    [
        "gpt_tp2pp2dp2_z1_bf16",
        "llama_tp2pp2dp1_z1_bf16",
        "gpt_HEADqkv_nopipe_tp1dp1_z1_bf16",
        "gpt_nopipe_tp2dp2_z1_fp16",
    ],
)
def test_golden_weights_come_back_bitwise(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    report = convert(source.path, tmp_path / "out", to="mcore")

    found = open_checkpoint(tmp_path / "out")
    assert (report.num_read, found.format) == (len(source.tensors), "torch_dist")
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        ours = found.tensor(key)
        assert (ours.shape, ours.dtype) == (tensor.shape, tensor.dtype)
        assert ours.numpy().tobytes() == tensor.numpy().tobytes(), key
    assert found.config == source.config
    for counter in ("iteration", "consumed_samples"):
        assert found.counters[counter] == source.counters[counter]
    assert list(verify(tmp_path / "out").problems) == []


def test_tensors_are_stored_as_the_real_megatron_core_stores_them(tmp_path: Path) -> None:
    theirs = fixture("mcore_torch_dist_gpt_tp2") / "ckpt" / "iter_0000010"
    facts = "torch_dist:num_attention_heads=4,activation=gelu"

    convert(theirs, tmp_path / "out", to="torch_dist", source_format=facts)

    wanted, found = read_metadata(theirs), read_metadata(tmp_path / "out" / "iter_0000010")
    shapes = {name: (t.shape, t.dtype) for name, t in wanted.tensors.items()}
    assert {name: (t.shape, t.dtype) for name, t in found.tensors.items()} == shapes
    assert found.objects.keys() >= wanted.objects.keys()
    marker = "metadata.json"
    ours = json.loads((tmp_path / "out" / "iter_0000010" / marker).read_text())
    assert ours == json.loads((theirs / marker).read_text())


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2", "qwen3"])
def test_families_that_megatron_deepspeed_lacks_are_written(tmp_path: Path, family: str) -> None:
    assert family in FAMILIES
    record = model(family)
    weights = arrays(record)
    save(tmp_path / "in", record, weights)

    convert(tmp_path / "in", tmp_path / "out", to="mcore", make_vocab_size_divisible_by=8)

    found = open_checkpoint(tmp_path / "out")
    for name, array in weights.items():
        np.testing.assert_array_equal(found.tensor(name).numpy(), array, err_msg=name)
    for field, value in record.config.items():
        assert found.config.get(field, value) == value, field
    assert found.model.vocab_size == 37
    table = read_metadata(found.path).tensors["embedding.word_embeddings.weight"]
    assert table.shape == (40, 16)


def test_data_files_end_where_they_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_dist, "FILE_BYTES", 4000)
    record = model("llama")
    save(tmp_path / "in", record, arrays(record))

    convert(tmp_path / "in", tmp_path / "out", to="mcore")

    (step,) = (tmp_path / "out").glob("iter_*")
    files = {path.name for path in step.glob("*.distcp")}
    assert len(files) > 3
    digests = json.loads((step / "integrity.json").read_text())["files"]
    assert digests.keys() == files | {"common.pt", ".metadata", "metadata.json"}
    assert list(verify(step).problems) == []
    file = step / sorted(files)[1]
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    assert any(problem.file == file.name for problem in verify(step).problems)


def test_a_release_has_its_own_folder(tmp_path: Path) -> None:
    source = fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt"

    convert(source, tmp_path / "out", to="mcore", release=True, dtype="F32")

    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    found = open_checkpoint(tmp_path / "out")
    assert found.path.name == "release"
    assert found.counters == {"iteration": 0, "consumed_samples": 0}
    assert {tensor.dtype for tensor in found.tensors.values()} == {"F32"}


@pytest.mark.parametrize("name", ["moe_nopipe_dp2ep2_z1_bf16", "bert_tp1_legacy_fp32"])
def test_experts_in_some_layers_and_berts_come_back_bitwise(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    convert(source.path, tmp_path / "out", to="mcore")

    found = open_checkpoint(tmp_path / "out")
    assert found.tensors.keys() == source.tensors.keys()
    for key, tensor in source.tensors.items():
        assert found.tensor(key).numpy().tobytes() == tensor.numpy().tobytes(), key
    assert found.model.family == source.model.family
    for field, value in source.config.items():
        # How choices are balanced in training is DeepSpeed's own.
        if field not in ("moe_balance_scope", "moe_balance_choices", "moe_min_capacity"):
            assert found.config[field] == value, field
    assert list(verify(tmp_path / "out").problems) == []


def test_experts_in_all_layers_are_stacked_behind_the_layer(tmp_path: Path) -> None:
    record = model("mixtral")
    weights = arrays(record)
    save(tmp_path / "in", record, weights)

    convert(tmp_path / "in", tmp_path / "out", to="mcore")

    found = open_checkpoint(tmp_path / "out")
    table = read_metadata(found.path)
    shapes = {name: tensor.shape for name, tensor in table.tensors.items()}
    assert shapes["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (2, 3, 48, 16)
    assert shapes["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == (2, 3, 16, 24)
    assert shapes["decoder.layers.mlp.router.weight"] == (2, 3, 16)
    assert shapes["decoder.layers.pre_mlp_layernorm.weight"] == (2, 16)
    extra = "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.2_2.3"
    assert extra in table.objects
    for name, array in weights.items():
        np.testing.assert_array_equal(found.tensor(name).numpy(), array, err_msg=name)
    for field, value in record.config.items():
        assert found.config[field] == value, field


def test_what_megatron_core_has_no_form_for_is_refused(tmp_path: Path) -> None:
    record = model("mixtral", layer_experts=[2, 3], num_experts=None)
    save(tmp_path / "grown", record, _with_experts([2, 3]))
    with pytest.raises(UnsupportedError, match="different numbers of experts"):
        convert(tmp_path / "grown", tmp_path / "out", to="mcore")
    record = model("llama", rope_scaling={"rope_type": "linear", "factor": 2.0})
    save(tmp_path / "scaled", record, arrays(record))
    for target in ("mcore", "megatron", "deepspeed"):
        with pytest.raises(UnsupportedError, match="rotary frequencies are scaled"):
            convert(tmp_path / "scaled", tmp_path / "out", to=target)
    with pytest.raises(UsageError, match="torch_dist holds whole tensors; leave --tp away"):
        convert(fixture("gpt_tp2pp2dp2_z1_bf16") / "ckpt", tmp_path / "out", to="mcore", tp=2)
    assert not (tmp_path / "out").exists()


def _with_experts(counts: list[int]) -> dict[str, Any]:
    """Random weights of a model whose layers have these numbers of experts."""
    most = model("mixtral", num_experts=max(counts))
    found = arrays(most)
    for layer, count in enumerate(counts):
        place = f"decoder.layers.{layer}.mlp"
        found[f"{place}.router.weight"] = found[f"{place}.router.weight"][:count]
        for number in range(count, max(counts)):
            for linear in ("linear_fc1", "linear_fc2"):
                del found[f"{place}.experts.local_experts.{number}.{linear}.weight"]
    return found
