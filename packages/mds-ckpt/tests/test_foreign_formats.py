"""Checkpoints of other frameworks: LitGPT, torchtitan, nanotron, GPT-NeoX, BigScience's BLOOM.

The samples are written here by the frameworks' own rules, apart from the readers' code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ckpt_samples as samples
import numpy as np
import pytest
import torch_dist_samples
from deepspeed_samples import Sample
from safetensors.numpy import load_file, save_file

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.cli import main
from mds_ckpt.errors import RejectedError, UsageError
from mds_ckpt.manifest import ModelRecord
from mds_ckpt.pickles.records import EnumRecord, Global, Namespace
from mds_ckpt.pickles.torch_writer import ordered, save_torch_file

Tensors = dict[str, np.ndarray[Any, Any]]
LAYERS, HEADS, GROUPS, CHANNELS = 2, 4, 2, 8
"""Of the models in ckpt_samples."""


def as_huggingface(folder: Path, record: ModelRecord) -> Tensors:
    """The model as transformers has it."""
    source = samples.save(folder / "source", record, samples.arrays(record))
    convert(source, folder / "theirs", to="hf")
    return load_file(folder / "theirs" / "model.safetensors")


def assert_holds(path: Path, record: ModelRecord, *, format: str | None = None) -> None:
    found = open_checkpoint(path, format=format)
    wanted = samples.arrays(record)
    assert found.tensors.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found.tensors[name].numpy(), array), name
    for key, value in record.config.items():
        assert found.config[key] == value, key


def paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of rotate-half as Meta's models have them."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


# LitGPT ------------------------------------------------------------------------------------------


def litgpt(folder: Path, record: ModelRecord, *, old: bool = False, **config: Any) -> Path:
    theirs = as_huggingface(folder, record)
    tensors: Tensors = {}
    for name, array in theirs.items():
        new = name.replace("model.embed_tokens", "transformer.wte").replace(
            "model.norm", "transformer.ln_f"
        )
        new = new.replace("model.layers", "transformer.h").replace(
            "post_attention_layernorm", "norm_2"
        )
        new = new.replace("input_layernorm", "norm_1").replace("self_attn.o_proj", "attn.proj")
        new = (
            new.replace("gate_proj", "fc_1").replace("up_proj", "fc_2").replace("down_proj", "proj")
        )
        new = new.replace("block_sparse_moe", "mlp").replace(".w1.", ".fc_1.")
        new = new.replace(".w3.", ".fc_2.").replace(".w2.", ".proj.")
        if "self_attn" not in new:
            tensors[new] = array
    for name in ("transformer.wte.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], np.zeros((3, 16), "f4")])
    for layer in range(LAYERS):
        parts = [theirs[f"model.layers.{layer}.self_attn.{x}_proj.weight"] for x in "qkv"]
        rows = [part.reshape(GROUPS, -1, CHANNELS, 16) for part in parts]
        grouped = np.concatenate(rows, axis=1).reshape(-1, 16)
        key = "attn" if old else "qkv"
        tensors[f"transformer.h.{layer}.attn.{key}.weight"] = (
            grouped if old else np.concatenate(parts)
        )
    folder.joinpath("lit").mkdir()
    save_torch_file(
        folder / "lit" / "lit_model.pth", {"model": tensors} if old else ordered(tensors)
    )
    members = {
        "name": "tiny",
        "hf_config": {"org": "none", "name": "tiny"},
        "block_size": 32,
        "n_layer": LAYERS,
        "n_embd": 16,
        "n_head": HEADS,
        "n_query_groups": GROUPS,
        "head_size": CHANNELS,
        "vocab_size": 37,
        "padded_vocab_size": 40,
        "intermediate_size": 24,
        "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP",
        "rotary_percentage": 1.0,
        "parallel_residual": "false",
        "bias": "false",
        "rope_base": 10000,
        **config,
    }
    lines = []
    for key, value in members.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {k}: {v}" for k, v in value.items())]
        else:
            lines.append(f"{key}: {value}")
    (folder / "lit" / "model_config.yaml").write_text("\n".join(lines) + "\n")
    return folder / "lit"


@pytest.mark.parametrize("old", [False, True])
def test_litgpt_in_both_row_orders(tmp_path: Path, old: bool) -> None:
    record = samples.model("llama")
    folder = litgpt(tmp_path, record, old=old)

    found = open_checkpoint(folder)

    assert found.format == "litgpt"
    assert found.model.padded_vocab_size == 40
    report = convert(folder, tmp_path / "mds", to="mds", vocab_size=37)
    assert report.num_read == len(found.tensors)
    assert_holds(tmp_path / "mds", record)


def test_litgpts_experts_become_mixtrals(tmp_path: Path) -> None:
    record = samples.model("mixtral")
    more = {"mlp_class_name": "LLaMAMoE", "n_expert": 3, "n_expert_per_token": 2}
    folder = litgpt(tmp_path, record, **more)

    convert(folder, tmp_path / "hf", to="hf", vocab_size=37)

    ours, theirs = tmp_path / "hf", tmp_path / "theirs"
    found, wanted = (load_file(path / "model.safetensors") for path in (ours, theirs))
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"post_mlp_norm": "true"}, "'post_mlp_norm' is set"),
        ({"final_logit_softcapping": 30.0}, "softcapping"),
        ({"mlp_class_name": "GemmaMLP"}, "'GemmaMLP'"),
        ({"n_layer": "!!python/object:os.system x"}, "more than plain YAML"),
        ({"n_layer": 3}, "it is missing"),
        ({"n_layer": 1}, "has none of it"),
    ],
)
def test_a_litgpt_model_that_ours_is_not_is_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = litgpt(tmp_path, samples.model("llama"), **config)

    with pytest.raises(RejectedError, match=words):
        open_checkpoint(folder)


# torchtitan --------------------------------------------------------------------------------------


def titan_names(theirs: Tensors) -> Tensors:
    tensors = {}
    for name, array in theirs.items():
        new = name.replace("model.embed_tokens", "tok_embeddings").replace("lm_head", "output")
        new = new.replace("model.norm", "norm").replace("model.layers", "layers")
        new = new.replace("input_layernorm", "attention_norm").replace("self_attn", "attention")
        new = new.replace("post_attention_layernorm", "ffn_norm").replace(
            "mlp.gate_proj", "feed_forward.w1"
        )
        new = new.replace("mlp.up_proj", "feed_forward.w3").replace(
            "mlp.down_proj", "feed_forward.w2"
        )
        for letter in "qkvo":
            new = new.replace(f"{letter}_proj", f"w{letter}")
        heads = {"wq": HEADS, "wk": GROUPS}.get(new.split(".")[-2])
        tensors[new] = array if heads is None else paired(array, heads)
    return tensors


def titan(folder: Path, record: ModelRecord) -> Path:
    theirs = titan_names(as_huggingface(folder, record))
    sample = torch_dist_samples.Sample(folder / "runs" / "step-40")
    for name, array in theirs.items():
        sample.tensor(name, array, pieces=2)
        sample.tensor(f"optimizer.state.{name}.exp_avg", array * 2)
        sample.tensor(f"optimizer.state.{name}.exp_avg_sq", array * array, pieces=3)
        sample.tensor(f"optimizer.state.{name}.step", np.array([40.0], "f4"))
    sample.stored_object("train_state", {"step": 40})
    sample.write(marker=False)
    (folder / "runs" / "step-8").mkdir()
    return folder / "runs"


def test_torchtitans_llama_with_its_moments(tmp_path: Path) -> None:
    record = samples.model("llama")
    folder = titan(tmp_path, record)
    words = "torchtitan:num_attention_heads=4,max_position_embeddings=32,rope_theta=10000"

    looked_at = open_checkpoint(folder)
    report = convert(folder, tmp_path / "mds", to="mds", source_format=words)

    assert (looked_at.format, looked_at.step) == ("torchtitan", 40)
    assert "tok_embeddings.weight" in looked_at.tensors
    assert any("say it with --from torchtitan:num_attention" in note for note in looked_at.notes)
    assert any("are left out" in note for note in report.notes)
    assert_holds(tmp_path / "mds", record)
    found = open_checkpoint(tmp_path / "mds")
    for name, array in samples.arrays(record).items():
        assert np.array_equal(found.tensor(name, "exp_avg").numpy(), array * 2)
        assert np.array_equal(found.tensor(name, "exp_avg_sq").numpy(), array * array)


def test_what_torchtitan_does_not_store_is_asked_for(tmp_path: Path) -> None:
    folder = titan(tmp_path, samples.model("llama"))

    with pytest.raises(RejectedError, match="--from torchtitan:num_attention_heads=VALUE"):
        convert(folder, tmp_path / "mds", to="mds")
    wrong = "torchtitan:num_attention_heads=3,max_position_embeddings=32,rope_theta=1"
    with pytest.raises(RejectedError, match="3 attention heads do not fit"):
        convert(folder, tmp_path / "mds", to="mds", source_format=wrong)
    with pytest.raises(UsageError, match="makes no sense"):
        convert(folder, tmp_path / "mds", to="mds", source_format=wrong.replace("=3", "=-3"))


# nanotron ----------------------------------------------------------------------------------------


def slices(*ranges: tuple[int, int] | None) -> str:
    return "|".join("None,None,None" if r is None else f"{r[0]},{r[1]},None" for r in ranges)


def nanotron(folder: Path, record: ModelRecord, *, interleaved: bool, tp: int = 2) -> Path:
    theirs = as_huggingface(folder, record)
    root = folder / "nano" / "12"
    place = root / "model" / "model"

    def put(
        name: str, array: np.ndarray[Any, Any], dim: int | None, chunks: tuple[int, ...] = ()
    ) -> None:
        *inside, last = name.split(".")
        target = place.joinpath(*inside)
        target.mkdir(parents=True, exist_ok=True)
        if dim is None:
            save_file({"data": array}, target / f"model_{last}.safetensors")
            return
        for rank in range(tp):
            parts, pairs, local, whole = [], [], 0, 0
            for size in chunks or (array.shape[dim],):
                count = size // tp
                first = whole + rank * count
                parts.append(np.take(array, range(first, first + count), axis=dim))
                both = [
                    slices(*[(a, a + count) if d == dim else None for d in range(2)])
                    for a in (local, first)
                ]
                pairs.append("#".join(both))
                local, whole = local + count, whole + size
            meta = {
                "version": "1.4",
                "local_global_slices_pairs": ";".join(pairs),
                "unsharded_shape": str(array.shape),
            }
            file = f"model_{last}_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}.safetensors"
            save_file(
                {"data": np.ascontiguousarray(np.concatenate(parts, axis=dim))}, target / file, meta
            )

    put(
        "token_position_embeddings.pp_block.token_embedding.weight",
        theirs["model.embed_tokens.weight"],
        0,
    )
    put("final_layer_norm.pp_block.weight", theirs["model.norm.weight"], None)
    put("lm_head.pp_block.weight", theirs["lm_head.weight"], 0)
    for layer in range(LAYERS):
        mine = {
            k.split(".", 3)[3]: v
            for k, v in theirs.items()
            if k.startswith(f"model.layers.{layer}.")
        }
        query, key, value = (mine[f"self_attn.{x}_proj.weight"] for x in "qkv")
        if interleaved:
            query, key = paired(query, HEADS), paired(key, GROUPS)
        block = f"decoder.{layer}.pp_block"
        fused = np.concatenate([query, key, value])
        put(f"{block}.attn.qkv_proj.weight", fused, 0, (len(query), len(key), len(value)))
        put(f"{block}.attn.o_proj.weight", mine["self_attn.o_proj.weight"], 1)
        halves = [mine[f"mlp.{half}_proj.weight"] for half in ("gate", "up")]
        put(f"{block}.mlp.gate_up_proj.weight", np.concatenate(halves), 0, (24, 24))
        put(f"{block}.mlp.down_proj.weight", mine["mlp.down_proj.weight"], 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"{block}.{norm}.weight", mine[f"{norm}.weight"], None)
    config = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": CHANNELS,
        "vocab_size": 38,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_interleaved": interleaved,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "is_llama_config": True,
        "attention_bias": False,
    }
    (root / "model_config.json").write_text(json.dumps(config))
    metas = {"last_train_step": 12, "consumed_train_samples": 96, "data_stages": []}
    meta = {"version": "1.4", "tp": tp, "dp": 1, "metas": metas}
    (root / "checkpoint_metadata.json").write_text(json.dumps(meta))
    (folder / "nano" / "latest.txt").write_text("12")
    return folder / "nano"


@pytest.mark.parametrize("interleaved", [True, False])
def test_nanotrons_slices_and_pairs(tmp_path: Path, interleaved: bool) -> None:
    record = samples.model("llama", vocab_size=38)
    folder = nanotron(tmp_path, record, interleaved=interleaved)

    found = open_checkpoint(folder)

    assert (found.format, found.step, found.counters["consumed_samples"]) == ("nanotron", 12, 96)
    assert found.parallel == {"pp": 1, "tp": 2}
    assert_holds(folder, record)


def test_a_missing_or_lying_slice_is_named(tmp_path: Path) -> None:
    folder = nanotron(tmp_path, samples.model("llama", vocab_size=38), interleaved=False)
    proj = folder / "12/model/model/decoder/1/pp_block/attn/o_proj"
    lost = proj / "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
    array = load_file(lost)

    lost.unlink()
    with pytest.raises(RejectedError, match=r"decoder\.1.*do not hold it exactly once"):
        open_checkpoint(folder)
    for text in ("0,99,None|0,16,None", "0,16,2|0,16,None", "a|b", "0,16,None"):
        meta = {"local_global_slices_pairs": f"{text}#{text}", "unsharded_shape": "(16, 32)"}
        save_file(array, lost, meta)
        with pytest.raises(RejectedError, match="slices"):
            open_checkpoint(folder)


def test_folders_that_are_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    nano = nanotron(tmp_path / "a", samples.model("llama", vocab_size=38), interleaved=False)
    (tmp_path / "b").mkdir()
    steps = titan(tmp_path / "b", samples.model("llama"))
    (nano / "12" / "model").rename(tmp_path / "elsewhere")
    (nano / "12" / "model").symlink_to(tmp_path / "elsewhere")
    (steps / "step-40").rename(tmp_path / "step")
    (steps / "step-40").symlink_to(tmp_path / "step")

    for path in (nano, steps):
        with pytest.raises(RejectedError, match="no reader recognises it"):
            open_checkpoint(path)


# GPT-NeoX and BLOOM ------------------------------------------------------------------------------

YAML = """# a comment
{
  "pipe_parallel_size": 1,
  # what matters
  "norm": "layernorm", "pos-emb": "rotary", "rotary-pct": 0.5,
  "gpt_j_residual": true, "no-weight-tying": true, "layernorm_epsilon": 1e-4,
  "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95],}},
}
"""


ROW_BIASES = ("self_attention.linear_proj.bias", "mlp.linear_fc2.bias")
MLP_OUT = ("mlp.dense_4h_to_h", "mlp.linear_fc2")


def neox(root: Path, sample: Sample, *, configs: str | None = YAML) -> Path:
    """Layer files from 0 on, no checkpoint_version, a plain dictionary of a few arguments."""
    folder = root / "global_step3"
    folder.mkdir(parents=True)
    files: dict[tuple[int, int], dict[str, Any]] = {}
    for name in sample.names:
        if "position_embeddings" in name:
            continue
        layer, key = sample.place(name)
        if name.startswith("embedding."):
            layer = 0
        elif name.startswith("decoder.final"):
            key = f"norm.{key}"
        elif name == "output_layer.weight":
            key = "final_linear.weight"
        key = key.replace("self_attention.", "attention.")
        for rank in range(sample.tp):
            files.setdefault((layer, rank), {})[key] = sample.local("weight", name, rank)
    for (layer, rank), tensors in files.items():
        if "attention.dense.weight" in tensors:  # a buffer, which is no parameter
            tensors["attention.rotary_emb.inv_freq"] = np.ones(2, "f4")
        save_torch_file(
            folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt", ordered(tensors)
        )
    args = {
        "num_layers": sample.layers,
        "hidden_size": sample.hidden,
        "num_attention_heads": sample.heads,
        "max_position_embeddings": sample.positions,
        "make_vocab_size_divisible_by": 8,
        "padded_vocab_size": sample.padded,
        "tokenizer_type": "HFTokenizer",
        "model_parallel_size": sample.tp,
    }
    state = {"module": None, "args": args, "iteration": 3, "global_steps": 3, "global_samples": 24}
    state |= {"mp_world_size": sample.tp, "dp_world_size": 1, "skipped_steps": 0}
    for rank in range(sample.tp):
        save_torch_file(folder / f"mp_rank_{rank:02d}_model_states.pt", state)
    (root / "latest").write_text("global_step3")
    if configs is not None:
        (folder / "configs").mkdir()
        (folder / "configs" / "20B.yml").write_text(configs)
    return root


@pytest.mark.parametrize("tp", [1, 2])
def test_gpt_neox_with_its_configuration_goes_to_transformers(tmp_path: Path, tp: int) -> None:
    sample = Sample(tp=tp, tied=False, norm_gap=1)
    folder = neox(tmp_path / "neox", sample)

    found = open_checkpoint(folder)
    convert(folder, tmp_path / "hf", to="hf", vocab_size=sample.vocab)

    assert (found.format, found.step) == ("gpt-neox", 3)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "gpt_neox"
    assert (config["rotary_pct"], config["use_parallel_residual"]) == (0.5, True)
    assert config["layer_norm_eps"] == 1e-4
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    name = "layers.1.attention.query_key_value.weight"
    ours = sample.tensors["weight/decoder.layers.1.self_attention.linear_qkv.weight"]
    assert np.array_equal(tensors[f"gpt_neox.{name}"], ours)
    assert np.array_equal(tensors["embed_out.weight"], sample.tensors["weight/output_layer.weight"])
    # Beside parallel residuals each tensor-parallel rank adds its own bias to the output.
    for theirs, part in (("attention.dense", "self_attention.linear_proj"), MLP_OUT):
        bias = sample.tensors[f"weight/decoder.layers.1.{part}.bias"]
        assert np.array_equal(tensors[f"gpt_neox.layers.1.{theirs}.bias"], tp * bias)


def test_gpt_neox_with_one_residual_adds_a_bias_once(tmp_path: Path) -> None:
    sample = Sample(tp=2, tied=False, norm_gap=1)
    configs = YAML.replace('"gpt_j_residual": true', '"gpt_j_residual": false')
    found = open_checkpoint(neox(tmp_path / "neox", sample, configs=configs))

    for name in sample.names:
        if name.startswith("decoder."):
            assert np.array_equal(found.tensors[name].numpy(), sample.tensors[f"weight/{name}"])


class Sequence(Sample):
    """GPT-NeoX without pipeline stages: all layers in the model files, as ``sequential.N``."""

    def engine_name(self, name: str) -> str:
        layer, key = self.place(name)
        if name.startswith("embedding."):
            layer = 0
        elif name.startswith("decoder.final"):
            key = f"norm.{key}"
        elif name == "output_layer.weight":
            key = "final_linear.weight"
        return f"sequential.{layer}.{key.replace('self_attention.', 'attention.')}"

    def _module(self, names: list[str], rank: int) -> dict[str, Any]:
        tensors = {self.engine_name(name): self.local("weight", name, rank) for name in names}
        if self.stage == 3:
            tensors = dict.fromkeys(tensors, np.zeros(0, "f4"))
        return ordered(tensors)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_gpt_neox_without_stages_is_read_with_its_optimizer(
    tmp_path: Path, stage: int, tied: bool
) -> None:
    layout = {"tp": 2, "dp": 2, "stage": stage, "tied": tied, "norm_gap": 1, "layers": 11}
    sample = Sequence(**layout, pipeline=False)
    folder = sample.write(tmp_path / "neox")
    (folder / "global_step3" / "configs").mkdir()
    (folder / "global_step3" / "configs" / "20B.yml").write_text(YAML)

    found = open_checkpoint(folder)

    assert (found.format, found.parallel["tp"], found.parallel["zero_stage"]) == (
        "gpt-neox",
        2,
        stage,
    )
    assert found.tensors.keys() == set(sample.names)
    for state in ("weight", "master", "exp_avg", "exp_avg_sq"):
        source = "master" if state == "weight" and stage == 3 else state
        for name in sample.names if state in found.states else ():
            wanted = sample.tensors[f"{source}/{name}"]
            if state in ("weight", "master") and name.endswith(ROW_BIASES):
                wanted = 2 * wanted  # each rank adds its own
            np.testing.assert_array_equal(found.tensor(name, state).numpy(), wanted, name)
    assert set(found.states) >= {"weight", "exp_avg", "exp_avg_sq"}


def test_gpt_neox_without_stages_is_converted(tmp_path: Path) -> None:
    sample = Sequence(tied=False, norm_gap=1, pipeline=False)
    folder = sample.write(tmp_path / "neox")
    said = "gpt-neox:activation=gelu_tanh,parallel_residual=true,position_embedding=learned"

    convert(folder, tmp_path / "mds", to="mds", source_format=said)

    back = open_checkpoint(tmp_path / "mds")
    assert back.config["parallel_residual"] is True
    for name in sample.names:
        wanted = sample.tensors[f"weight/{name}"]
        np.testing.assert_array_equal(back.tensor(name).numpy(), wanted)


def test_gpt_neox_without_its_configuration_asks(tmp_path: Path) -> None:
    folder = neox(tmp_path / "neox", Sample(tied=False, norm_gap=1), configs=None)

    with pytest.raises(RejectedError, match="--from gpt-neox:activation=VALUE,parallel_residual"):
        convert(folder, tmp_path / "hf", to="hf")
    said = "gpt-neox:activation=gelu_tanh,parallel_residual=true,position_embedding=rope"
    convert(folder, tmp_path / "hf", to="hf", source_format=said)

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["hidden_act"], config["rotary_pct"]) == ("gelu_fast", 1.0)
    assert open_checkpoint(folder).format == "gpt-neox"  # looking at it needs no facts


def test_a_gpt_neox_that_ours_is_not_is_refused(tmp_path: Path) -> None:
    folder = neox(tmp_path / "neox", Sample(), configs='{"pos_emb": "sinusoidal"}')

    with pytest.raises(RejectedError, match="'pos_emb' is 'sinusoidal'"):
        open_checkpoint(folder)


class Bloom(Sample):
    """BigScience's pipeline: blocks from 3 on, a norm of the token vectors, ALiBi."""

    def __post_init__(self) -> None:
        super().__post_init__()
        random = np.random.default_rng(3)
        for key in [key for key in self.tensors if "position_embeddings" in key]:
            del self.tensors[key]
        for state in ("weight", "master", "exp_avg", "exp_avg_sq"):
            for part in ("weight", "bias"):
                values = random.standard_normal(self.hidden).astype("f4")
                self.tensors[f"{state}/embedding.layernorm.{part}"] = values

    def place(self, name: str) -> tuple[int, str]:
        layer, key = super().place(name)
        if name.startswith("embedding."):
            layer = 1
        return layer, key.replace("layernorm.", "word_embeddings.norm.", 1) if layer == 1 else key

    def args(self) -> Namespace:
        kind = EnumRecord(Global("megatron.enums", "PositionEmbeddingType"), 3)
        more = {"position_embedding_type": kind, "embed_layernorm": True, "bias_gelu_fusion": True}
        return Namespace({**super().args().fields, **more})


def test_blooms_of_bigscience_become_blooms_of_transformers(tmp_path: Path) -> None:
    sample = Bloom(tp=2, pp=2, width=32, first_block=3, norm_gap=1)
    folder = sample.write(tmp_path / "bloom")

    convert(folder, tmp_path / "hf", to="hf")

    found = open_checkpoint(folder)
    assert (found.config["position_embedding"], found.config["embedding_norm"]) == ("alibi", True)
    again = open_checkpoint(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "bloom"
    for name in sample.names:
        assert np.array_equal(again.tensors[name].numpy(), sample.tensors[f"weight/{name}"]), name
        assert np.array_equal(
            found.tensor(name, "exp_avg").numpy(), sample.tensors[f"exp_avg/{name}"]
        )


def test_every_foreign_checkpoint_can_be_looked_at(tmp_path: Path, capsys: Any) -> None:
    record = samples.model("llama", vocab_size=38)
    for number, make in enumerate((litgpt, titan, nanotron, neox)):
        folder = tmp_path / str(number)
        folder.mkdir()
        if make is nanotron:
            path = nanotron(folder, record, interleaved=True)
        elif make is neox:
            path = neox(folder / "neox", Sample())
        else:
            path = make(folder, samples.model("llama"))
        assert main(["inspect", str(path)]) == 0
        assert main(["verify", str(path)]) == 0
        assert "nothing is missing" in capsys.readouterr().out
