"""Hugging Face folders: out and back bitwise, and what can't be carried is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.families import choose
from mds_ckpt.families.change import Fused, Grouped, Paired, Stacked, Thirds, Transposed
from mds_ckpt.files.file_operations import REAL
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file
from mds_ckpt.plan import Options
from mds_ckpt.writers.huggingface import plan


@pytest.fixture(params=samples.FAMILIES)
def family(request: Any) -> str:
    return str(request.param)


def save(tmp_path: Path, family: str, *, dtype: Any = np.float32, **changes: Any) -> Path:
    model = samples.model(family, **changes)
    return samples.save(
        tmp_path / "ckpt", model, samples.arrays(model, dtype=dtype), optimizer=True
    )


def export(tmp_path: Path, family: str, **changes: Any) -> Path:
    convert(save(tmp_path, family, **changes), tmp_path / "hf", to="hf")
    return tmp_path / "hf"


def edit(path: Path, **members: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | members))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3))
def test_changes_are_bijections(groups: int, queries: int, channels: int, hidden: int) -> None:
    grouped = Grouped(groups, queries, channels)
    rows = groups * (queries + 2) * channels
    array = np.arange(rows * hidden).reshape(rows, hidden)
    changes: list[Any] = [
        grouped,
        Thirds(grouped),
        Transposed(),
        Transposed(Thirds(grouped)),
    ]
    changes += [Stacked()] if rows % 2 == 0 else []
    changes += [Fused(grouped)]
    changes += [Paired(grouped), Fused(Paired(grouped))] if channels % 2 == 0 else []
    for change in changes:
        assert np.array_equal(change.to_canonical(*change.to_hf(array)), array)


def test_query_key_and_value_rows_are_taken_from_their_groups() -> None:
    """Two groups of two query heads of one channel: rows q0 q1 k v, q2 q3 k v."""
    query, key, value = Grouped(2, 2, 1).to_hf(np.arange(8))

    assert query.tolist() == [0, 1, 4, 5]
    assert key.tolist() == [2, 6]
    assert value.tolist() == [3, 7]


def test_out_and_back_is_bitwise_the_same(tmp_path: Path, family: str) -> None:
    source = save(tmp_path, family)

    out = convert(source, tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "back", to="mds")
    again = convert(tmp_path / "back", tmp_path / "hf2", to="hf")

    first, second = open_checkpoint(source), open_checkpoint(tmp_path / "back")
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert np.array_equal(tensor.numpy(), second.tensors[name].numpy()), name
    for path in (tmp_path / "hf").iterdir():
        assert path.read_bytes() == (tmp_path / "hf2" / path.name).read_bytes(), path.name
    assert out.num_read == len(first.tensors)
    assert out.num_written == again.num_written == len(load_file(tmp_path / "hf/model.safetensors"))
    assert out.dropped == {"exp_avg: the format holds weights only": len(first.tensors)}


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_random_models_go_out_and_back(tmp_path_factory: Any, data: Any) -> None:
    tmp_path = tmp_path_factory.mktemp("hf")
    family = data.draw(st.sampled_from(samples.FAMILIES))
    groups, queries = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    changes: dict[str, Any] = {
        "num_layers": data.draw(st.integers(1, 3)),
        "hidden_size": 4 * groups * queries,
        "num_attention_heads": groups * queries,
        "vocab_size": data.draw(st.integers(1, 70)),
    }
    if family not in samples.BERTS:
        changes["tie_embeddings"] = data.draw(st.booleans())
    if family == "gpt_neox":
        changes["rope_percent"] = 1.0
    if family in samples.LLAMAS:
        changes |= {
            "num_key_value_heads": groups,
            "head_dim": data.draw(st.sampled_from([None, 2, 6])),
            "ffn_hidden_size": data.draw(st.integers(1, 20)),
        }
    dtype = data.draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    source = save(tmp_path, family, dtype=dtype, **changes)

    convert(source, tmp_path / "hf", to="hf")
    back = open_checkpoint(tmp_path / "hf")

    for name, tensor in open_checkpoint(source).tensors.items():
        assert back.tensors[name].dtype == tensor.dtype
        assert back.tensors[name].numpy().tobytes() == tensor.numpy().tobytes(), name


def test_the_configuration_survives_the_way_out_and_back(tmp_path: Path, family: str) -> None:
    source = save(tmp_path, family)
    convert(source, tmp_path / "hf", to="hf")

    before, after = open_checkpoint(source).model, open_checkpoint(tmp_path / "hf").model

    assert before.vocab_size == after.vocab_size
    assert before.tied_embeddings == after.tied_embeddings
    for key, value in before.config.items():
        assert after.config[key] == value, key


def test_shards_and_their_index_hold_every_tensor_once(tmp_path: Path) -> None:
    source = open_checkpoint(save(tmp_path, "llama"))
    folder = tmp_path / "hf"
    folder.mkdir()

    plan(source, Options(jobs=3, shard_bytes=3000)).write(folder, REAL)

    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    held = {key: name for name in names for key in load_file(folder / name)}
    assert index["weight_map"] == held
    opened = open_checkpoint(folder)
    for name, tensor in source.tensors.items():
        assert np.array_equal(opened.tensors[name].numpy(), tensor.numpy())


@pytest.mark.parametrize("count", [1, 3])
def test_legacy_torch_files_are_read_whole_or_in_shards(tmp_path: Path, count: int) -> None:
    folder = export(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {f"pytorch_model-{i + 1:05d}-of-{count:05d}.bin": names[i::count] for i in range(count)}
    if count == 1:
        files = {"pytorch_model.bin": names}
    else:
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for file, held in files.items():
        save_torch_file(folder / file, ordered({name: tensors[name] for name in held}))
    (folder / "model.safetensors").unlink()

    report = convert(folder, tmp_path / "again", to="hf")

    assert report.source_format == "hf"
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(found[name], tensors[name]) for name in names)
    if count > 1:
        (folder / "pytorch_model-00002-of-00003.bin").unlink()
        with pytest.raises(RejectedError, match="no such file"):
            open_checkpoint(folder)


def test_settings_of_the_source_come_back_byte_for_byte(tmp_path: Path) -> None:
    folder = export(tmp_path, "llama")
    texts = {
        "generation_config.json": b'{"temperature": 0.6, "top_p": 0.9}',
        "tokenizer_config.json": b'{"model_max_length": 7}',
        "special_tokens_map.json": b"{}",
        "vocab.txt": b"[PAD]\n[UNK]\n",
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text)

    convert(folder, tmp_path / "mds", to="mds")
    convert(tmp_path / "mds", tmp_path / "again", to="hf")

    for name, text in texts.items():
        assert (tmp_path / "again" / name).read_bytes() == text, name


def test_tokenizer_and_generation_settings_travel_along(tmp_path: Path) -> None:
    folder = export(tmp_path, "gpt2")

    assert (folder / "tokenizer.json").read_bytes() == samples.TOKENIZER
    settings_ = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings_["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings_["eos_token"] == "<|endoftext|>"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 0
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 0


def test_members_of_an_imported_configuration_come_back(tmp_path: Path) -> None:
    folder = export(tmp_path, "llama")
    edit(folder / "config.json", eos_token_id=7, pretraining_tp=1, use_cache=True)
    convert(folder, tmp_path / "back", to="mds")
    convert(tmp_path / "back", tmp_path / "again", to="hf")

    members = json.loads((tmp_path / "again" / "config.json").read_text())

    assert (members["eos_token_id"], members["pretraining_tp"], members["use_cache"]) == (
        7,
        1,
        True,
    )


def test_scaled_rotation_is_carried_in_both_styles(tmp_path: Path) -> None:
    folder = export(tmp_path, "llama", rope_theta=500.0)
    scaling = {"rope_type": "linear", "factor": 2.0}
    edit(folder / "config.json", rope_parameters=scaling | {"rope_theta": 500.0})

    convert(folder, tmp_path / "back", to="mds")
    convert(tmp_path / "back", tmp_path / "again", to="hf")

    members = json.loads((tmp_path / "again" / "config.json").read_text())
    assert members["rope_scaling"] == scaling
    assert members["rope_theta"] == 500.0
    assert members["rope_parameters"] == scaling | {"rope_theta": 500.0}


def test_a_cast_that_loses_values_stops_unless_it_is_allowed(tmp_path: Path) -> None:
    model = samples.model("gpt2")
    weights = samples.arrays(model)
    weights["decoder.layers.0.mlp.linear_fc1.weight"].flat[:2] = [1e5, 3e38]
    weights["decoder.final_layernorm.bias"][0] = 1e-30
    source = samples.save(tmp_path / "ckpt", model, weights)

    with pytest.raises(UnsupportedError) as caught:
        convert(source, tmp_path / "hf", to="hf", dtype="F16")
    assert "transformer.h.0.mlp.c_fc.weight: 2 beyond its largest number" in str(caught.value)
    assert "transformer.ln_f.bias: 1 below its smallest" in str(caught.value)
    assert "--allow-loss" in str(caught.value)
    assert not (tmp_path / "hf").exists()

    report = convert(source, tmp_path / "hf", to="hf", dtype="F16", allow_loss=True)
    assert len(report.losses) == 2
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float16"


def test_padding_rows_are_cut_to_the_true_vocabulary(tmp_path: Path) -> None:
    model = replace(samples.model("gpt2", vocab_size=37), padded_vocab_size=40)
    weights = samples.arrays(model)
    source = samples.save(tmp_path / "ckpt", model, weights)

    convert(source, tmp_path / "hf", to="hf")
    small = convert(source, tmp_path / "small", to="hf", vocab_size=11)
    convert(source, tmp_path / "mds", to="mds", vocab_size=37)

    assert any("26 of 37 rows of the vocabulary are left out" in note for note in small.notes)
    rows = weights["embedding.word_embeddings.weight"]
    name = "transformer.wte.weight"
    assert np.array_equal(load_file(tmp_path / "hf/model.safetensors")[name], rows[:37])
    assert np.array_equal(load_file(tmp_path / "small/model.safetensors")[name], rows[:11])
    assert json.loads((tmp_path / "small" / "config.json").read_text())["vocab_size"] == 11
    assert open_checkpoint(tmp_path / "mds").tensors["embedding.word_embeddings.weight"].shape == (
        37,
        16,
    )
    with pytest.raises(RejectedError, match="embedding has 40 rows"):
        convert(source, tmp_path / "x", to="hf", vocab_size=41)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_norm": True}, "needs no query/key norms"),
        ({"activation": "swiglu"}, "activations"),
        ({"zero_centered_norm": True}, "stored minus one"),
        ({"position_embedding": "none"}, "positions"),
    ],
)
def test_a_model_without_counterpart_says_what_is_in_the_way(changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose(
            ModelRecord(
                family="gpt",
                config=samples.config("gpt2", **changes),
                vocab_size=37,
                tied_embeddings=True,
            )
        )


# Hostile and damaged folders ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"model_type": "rwkv"}, "'rwkv' is of no family"),
        ({"model_type": "t5"}, "T5 has a table of relative positions"),
        ({"model_type": "\x1b[2J"}, r"'\\x1b\[2J' is of no family"),
        ({"n_layer": 10**9}, "'n_layer'"),
        ({"n_embd": -4}, "'n_embd'"),
        ({"n_embd": 2**40}, "'n_embd'"),
        ({"n_head": "4"}, "'n_head'"),
        ({"activation_function": "tanh"}, "which we don't have"),
        ({"scale_attn_by_inverse_layer_idx": True}, "changes attention"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"n_embd": 32}, "it has shape"),
        ({"n_layer": 3}, "tensor 'transformer.h.2.ln_1.weight': it is missing"),
        ({"n_layer": 1}, "no gpt2 has it"),
        ({"tie_word_embeddings": False}, "tensor 'lm_head.weight': it is missing"),
        ({"tie_word_embeddings": "no"}, "not true or false"),
    ],
)
def test_a_configuration_that_lies_is_refused(tmp_path: Path, members: Any, words: str) -> None:
    folder = export(tmp_path, "gpt2")
    edit(folder / "config.json", **members)

    with pytest.raises(RejectedError, match=words):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "not one JSON object"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":NaN}', "NaN"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_configuration_that_is_no_strict_json_is_refused(
    tmp_path: Path, text: bytes, words: str
) -> None:
    folder = export(tmp_path, "gpt2")
    (folder / "config.json").write_bytes(text)

    with pytest.raises(RejectedError, match=words):
        open_checkpoint(folder)


def with_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m | {"x": "../stolen.safetensors"}, "path separator"),
        (lambda m: m | {"x": "/etc/passwd"}, "path separator"),
        (lambda m: m | {"x": 3}, "not a string"),
        (lambda m: m | {"x": "missing.safetensors"}, "no such file"),
        (lambda m: m | {"x": "a.safetensors"}, "the file lacks it"),
        (
            lambda m: m | {"x": "model.safetensors.index.json"},
            "index.json",
        ),
        (lambda m: {}, "no object 'weight_map'"),
        (lambda m: [], "no object 'weight_map'"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    folder = export(tmp_path, "gpt2")
    (tmp_path / "stolen.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    weight_map = dict.fromkeys(load_file(folder / "model.safetensors"), "a.safetensors")
    with_index(folder, change(weight_map))

    with pytest.raises(RejectedError, match=words):
        open_checkpoint(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = export(tmp_path, "gpt2")
    tensors = load_file(folder / "model.safetensors")
    with_index(
        folder, dict.fromkeys(tensors, "a.safetensors") | {"transformer.ln_f.bias": "b.safetensors"}
    )
    save_file({"transformer.ln_f.bias": tensors["transformer.ln_f.bias"]}, folder / "b.safetensors")

    with pytest.raises(
        RejectedError, match=r"tensor 'transformer.ln_f.bias': it stands in two files"
    ):
        open_checkpoint(folder)


def test_links_are_followed_only_within_a_cache(tmp_path: Path) -> None:
    """A cache has ``snapshots/REVISION/NAME`` linking to ``blobs/HASH``."""
    folder = export(tmp_path, "gpt2")
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))

    convert(snapshot, tmp_path / "copy", to="mds")

    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"secret")
    with pytest.raises(RejectedError, match="link to another place"):
        open_checkpoint(snapshot)


def test_a_companion_that_is_a_link_is_never_published(tmp_path: Path) -> None:
    folder = export(tmp_path, "gpt2")
    secret = tmp_path / "secret"
    secret.write_text("password")
    (folder / "vocab.json").symlink_to(secret)

    with pytest.raises(RejectedError, match=r"vocab\.json: it is a link"):
        convert(folder, tmp_path / "mds", to="mds")
    assert not (tmp_path / "mds").exists()


def test_a_stored_head_of_a_tied_model_must_be_its_embedding(tmp_path: Path) -> None:
    folder = export(tmp_path, "gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()
    save_file(tensors, folder / "model.safetensors")
    assert "it is embedding.word_embeddings.weight again" in open_checkpoint(folder).notes[0]

    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(RejectedError, match=r"lm_head.weight': no gpt2 has it"):
        open_checkpoint(folder)


def test_a_base_model_without_prefix_and_with_masks_is_read(tmp_path: Path) -> None:
    folder = export(tmp_path, "gpt2")
    tensors = load_file(folder / "model.safetensors")
    plain = {name.removeprefix("transformer."): array for name, array in tensors.items()}
    plain["h.0.attn.bias"] = np.tril(np.ones((1, 1, 4, 4), "u1"))
    save_file(plain, folder / "model.safetensors")

    checkpoint = open_checkpoint(folder)

    assert "h.0.attn.bias was dropped" in checkpoint.notes[0]
    wte = checkpoint.tensors["embedding.word_embeddings.weight"].numpy()
    assert np.array_equal(wte, tensors["transformer.wte.weight"])
