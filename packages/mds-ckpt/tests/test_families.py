"""What single families have of their own: heads that may be absent, old names, copies, experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
from golden import fixture
from safetensors.numpy import load_file, save_file

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.errors import RejectedError
from mds_ckpt.families import choose
from mds_ckpt.families.mixtral import MIXTRAL
from mds_ckpt.manifest import ModelRecord

WORDS = "bert.embeddings.word_embeddings.weight"


def export(tmp_path: Path, record: ModelRecord) -> Path:
    source = samples.save(tmp_path / "ckpt", record, samples.arrays(record))
    convert(source, tmp_path / "hf", to="hf")
    return tmp_path / "hf"


def rename(folder: Path, change: Any) -> None:
    """Write the folder's weights again under other names."""
    path = folder / "model.safetensors"
    save_file({change(name): array for name, array in load_file(path).items()}, path)


def same_tensors(folder: Path, record: ModelRecord) -> bool:
    found = open_checkpoint(folder)
    wanted = samples.arrays(record)
    return found.tensors.keys() == wanted.keys() and all(
        np.array_equal(found.tensors[name].numpy(), array) for name, array in wanted.items()
    )


@pytest.mark.parametrize(
    ("heads", "architecture", "prefix"),
    [
        ({}, "BertForPreTraining", "bert."),
        ({"binary_head": False}, "BertForMaskedLM", "bert."),
        ({"binary_head": False, "word_head": False, "pooler": True}, "BertModel", ""),
        ({"binary_head": False, "word_head": False}, "BertModel", ""),
        ({"word_head": False}, "BertForNextSentencePrediction", "bert."),
    ],
)
def test_a_bert_has_the_heads_that_its_tensors_show(
    tmp_path: Path, heads: dict[str, bool], architecture: str, prefix: str
) -> None:
    record = samples.model("bert", **heads)

    folder = export(tmp_path, record)

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert f"{prefix}embeddings.LayerNorm.weight" in load_file(folder / "model.safetensors")
    assert not (folder / "generation_config.json").exists()
    assert same_tensors(folder, record)
    found = open_checkpoint(folder).config
    assert found["word_head"] == heads.get("word_head", True)
    assert found["binary_head"] == heads.get("binary_head", True)


def test_published_norms_are_ours_shifted_by_one(tmp_path: Path) -> None:
    record = samples.model("bert")
    ours = samples.arrays(record)

    theirs = load_file(export(tmp_path, record) / "model.safetensors")

    for norm, hf in {
        "encoder.layers.0.input_layernorm": "bert.embeddings.LayerNorm",
        "encoder.layers.0.pre_mlp_layernorm": "bert.encoder.layer.0.attention.output.LayerNorm",
        "encoder.layers.1.input_layernorm": "bert.encoder.layer.0.output.LayerNorm",
        "encoder.final_layernorm": "bert.encoder.layer.1.output.LayerNorm",
    }.items():
        assert np.array_equal(theirs[f"{hf}.weight"], ours[f"{norm}.weight"]), norm


def test_old_spellings_and_prefixes_are_understood(tmp_path: Path) -> None:
    record = samples.model("bert")
    folder = export(tmp_path, record)
    rename(
        folder,
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ),
    )

    assert same_tensors(folder, record)

    base = samples.model("bert", binary_head=False, word_head=False)
    (tmp_path / "base").mkdir()
    folder = export(tmp_path / "base", base)
    rename(folder, lambda name: f"bert.{name}")
    assert same_tensors(folder, base)


def test_copies_of_tied_tensors_are_dropped_if_they_are_equal(tmp_path: Path) -> None:
    record = samples.model("megatron-bert")
    folder = export(tmp_path, record)
    tensors = load_file(folder / "model.safetensors")
    copies = {
        "cls.predictions.decoder.weight": tensors[WORDS],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
    }
    save_file(tensors | copies, folder / "model.safetensors")

    assert same_tensors(folder, record)
    assert sum("again" in note for note in open_checkpoint(folder).notes) == 2

    copies["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1
    save_file(tensors | copies, folder / "model.safetensors")
    with pytest.raises(RejectedError, match="no megatron-bert has it"):
        open_checkpoint(folder)


def test_a_bert_that_decodes_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path, samples.model("bert"))
    config = json.loads((folder / "config.json").read_text())

    for member, words in {
        "is_decoder": "our BERT is an encoder",
        "tie_word_embeddings": "ties",
    }.items():
        changed = config | {member: not config.get(member, False)}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(RejectedError, match=words):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_interval": 2}, "as many experts in every layer"),
        ({"moe_residual": True}, "no MLP beside the experts"),
        ({"moe_topk": 1, "moe_normalize_gates": None}, "sum to 1"),
        ({"normalization": "layernorm"}, "RMS norms"),
    ],
)
def test_experts_that_mixtral_has_not_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(samples.model("mixtral", **changes), prefer="mixtral")


def test_places_for_tokens_are_named_as_a_difference(tmp_path: Path) -> None:
    record = samples.model("mixtral", moe_eval_capacity_factor=1.25)
    source = samples.save(tmp_path / "ckpt", record, samples.arrays(record))

    report = convert(source, tmp_path / "hf", to="hf")

    assert any("places for 1.25 times" in note for note in report.notes)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["num_local_experts"] == 3


def test_megatron_deepspeeds_experts_become_mixtrals(tmp_path: Path) -> None:
    record = samples.model("mixtral", num_experts=4, head_dim=None)
    source = samples.save(tmp_path / "ckpt", record, samples.arrays(record))

    convert(source, tmp_path / "ranks", to="deepspeed", tp=2, dp=2, ep=2, pipeline=False)
    convert(tmp_path / "ranks", tmp_path / "hf", to="hf", vocab_size=37)

    assert open_checkpoint(tmp_path / "ranks").format == "deepspeed"
    assert same_tensors(tmp_path / "hf", record)


def test_megatrons_t5_is_refused_with_the_reason() -> None:
    record = replace(samples.model("gpt2"), family="t5")

    with pytest.raises(ValueError, match="neither holds the other"):
        choose(record)


@pytest.mark.parametrize("name", ["bert_tp1_legacy_fp32", "t5_tp1_legacy_fp32"])
def test_recorded_encoders_go_through_ranks_and_our_format(tmp_path: Path, name: str) -> None:
    source = open_checkpoint(fixture(name) / "ckpt")

    convert(source.path, tmp_path / "megatron", to="megatron", tp=2)
    convert(tmp_path / "megatron", tmp_path / "mds", to="mds")

    found = open_checkpoint(tmp_path / "mds")
    assert found.model == source.model
    assert found.states.keys() == source.states.keys() == {"weight", "exp_avg", "exp_avg_sq"}
    for state, tensors in source.states.items():
        for name_, tensor in tensors.items():
            assert np.array_equal(found.tensor(name_, state).numpy(), tensor.numpy()), name_


def test_what_no_argument_tells_of_an_encoder_is_read_from_its_tensors() -> None:
    bert = open_checkpoint(fixture("bert_tp1_legacy_fp32") / "ckpt").config
    t5 = open_checkpoint(fixture("t5_tp1_legacy_fp32") / "ckpt").config

    assert (bert["num_token_types"], bert["word_head"], bert["binary_head"]) == (2, True, True)
    assert t5["decoder_num_layers"] == t5["num_layers"] == 4


def test_a_mixtral_says_little_and_means_transformers_defaults() -> None:
    """They are other than a Llama's: a base of 10,000 would turn every position wrongly."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 8}
    more = {"intermediate_size": 16, "vocab_size": 9, "max_position_embeddings": 8}

    record = MIXTRAL.from_hf_config({**sizes, **more})

    assert (record.config["rope_theta"], record.config["norm_epsilon"]) == (1e6, 1e-5)
    assert (record.config["num_experts"], record.config["moe_topk"]) == (8, 2)
    told = MIXTRAL.from_hf_config({**sizes, **more, "rope_parameters": {"rope_theta": 5e5}})
    assert told.config["rope_theta"] == 5e5
