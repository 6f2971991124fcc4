"""GPT computes what the real Megatron-DeepSpeed computed: recorded logits and first losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mds_ckpt import open_checkpoint
from mds_core import GPTConfig, ProcessGroups, T5Config
from mds_core.models import GPT, T5
from mds_kernels.testing import TOLERANCES

LOGITS_ATOL = 2e-6  # the models are barely trained, so wrong conversions give small errors
GPT2 = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "make_vocab_size_divisible_by": 1,
    "activation": "gelu",
}
LLAMA = GPT2 | {
    "ffn_hidden_size": 96,
    "position_embedding": "rope",
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "add_bias": False,
    "tie_embeddings": False,
}
LAYER_PARTS = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
OUTER = {
    "tied_modules.embed.word_embeddings": "embedding.word_embeddings",
    "tied_modules.embed.position_embeddings": "embedding.position_embeddings",
    "1.word_embeddings": "embedding.word_embeddings",
    "6": "decoder.final_layernorm",
    "7": "decoder.final_layernorm",
    "7.lm_head": "output_layer",
    "language_model.embedding.word_embeddings": "embedding.word_embeddings",
    "language_model.embedding.position_embeddings": "embedding.position_embeddings",
    "language_model.encoder.final_layernorm": "decoder.final_layernorm",
}


def canonical(name: str) -> str:
    """Megatron-DeepSpeed's name, of the pipeline module or of GPTModel, in canonical form."""
    module, kind = name.rsplit(".", 1)
    if module in OUTER:
        return f"{OUTER[module]}.{kind}"
    if module.startswith("language_model.encoder.layers."):
        layer, part = module.removeprefix("language_model.encoder.layers.").split(".", 1)
        return f"decoder.layers.{layer}.{LAYER_PARTS[part]}.{kind}"
    number, part = module.split(".", 1)
    return f"decoder.layers.{int(number) - 2}.{LAYER_PARTS[part]}.{kind}"


def load(weights: dict[str, np.ndarray], base: dict) -> GPT:
    """A model with the recorded weights; the original's padding rows take part."""
    renamed = {canonical(name): torch.from_numpy(value) for name, value in weights.items()}
    vocab_size = renamed["embedding.word_embeddings.weight"].size(0)
    model = GPT(GPTConfig(**base, vocab_size=vocab_size), ProcessGroups.single()).eval()
    model.load_state_dict(renamed, strict=True)
    return model


@pytest.mark.parametrize(
    ("folder", "base"),
    [
        ("gpt_tp2pp2dp2_z1_bf16", GPT2),
        ("gpt_nopipe_tp2dp2_z1_fp16", GPT2),
        ("gpt_nopipe_dp2_z3_bf16", GPT2),
        ("llama_tp2pp2dp1_z1_bf16", LLAMA),
    ],
)
def test_logits_of_recorded_checkpoints(golden: Path, folder: str, base: dict) -> None:
    recorded = np.load(golden / folder / "expected.npz")
    masters = {n.removeprefix("fp32/"): recorded[n] for n in recorded if n.startswith("fp32/")}
    model = load(masters, base)

    with torch.no_grad():
        logits = model(torch.from_numpy(recorded["tokens"]).long())

    expected = torch.from_numpy(recorded["logits_fp32_master"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_ATOL)


def test_logits_of_a_recorded_mixture_of_experts(golden: Path) -> None:
    """The recorded weights hold one rank's experts only, so all come from the checkpoint."""
    recorded = np.load(golden / "moe_nopipe_dp2ep2_z1_bf16" / "expected.npz")
    checkpoint = open_checkpoint(golden / "moe_nopipe_dp2ep2_z1_bf16" / "ckpt")
    weights = {
        name: torch.from_numpy(tensor.numpy().astype(np.float32))
        for name, tensor in checkpoint.tensors.items()
    }
    table = recorded["lp/language_model.embedding.word_embeddings.weight"]  # with its padding rows
    weights["embedding.word_embeddings.weight"] = torch.from_numpy(table)
    config = GPTConfig(**GPT2, vocab_size=len(table), num_experts=4, expert_interval=2)
    model = GPT(config, ProcessGroups.single()).eval()
    model.load_state_dict(weights, strict=True)

    with torch.no_grad():
        logits = model(torch.from_numpy(recorded["tokens"]).long())

    expected = torch.from_numpy(recorded["logits_fp32_lp"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_ATOL)


def test_logits_of_a_recorded_t5(golden: Path) -> None:
    recorded = np.load(golden / "t5_tp1_legacy_fp32" / "expected.npz")
    checkpoint = open_checkpoint(golden / "t5_tp1_legacy_fp32" / "ckpt")
    weights = {name: torch.from_numpy(t.numpy()) for name, t in checkpoint.tensors.items()}
    padded = {  # the recorded scores are those of the padding rows, too
        "embedding.word_embeddings.weight": "lp/language_model.embedding.word_embeddings.weight",
        "output_layer.bias": "lp/lm_head.bias",
    }
    for name, stored in padded.items():
        assert np.array_equal(recorded[stored][: len(weights[name])], weights[name])
        weights[name] = torch.from_numpy(recorded[stored])
    shape = checkpoint.model.config | {"vocab_size": 1024, "make_vocab_size_divisible_by": 1}
    model = T5(T5Config.from_record(shape), ProcessGroups.single()).eval()
    model.load_state_dict(weights, strict=True)

    with torch.no_grad():
        logits = model(torch.from_numpy(recorded["enc"]), torch.from_numpy(recorded["dec"]))

    expected = torch.from_numpy(recorded["logits_fp32_lp"])
    torch.testing.assert_close(logits, expected, rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize(
    ("initial", "run", "base"),
    [
        ("init_gpt.npz", "traj_tp1pp1dp1_fp32", GPT2),
        ("init_llama.npz", "trajnoclip_llama_tp1pp1dp1_fp32", LLAMA),
    ],
)
def test_first_loss_of_recorded_trajectories(
    golden: Path, initial: str, run: str, base: dict
) -> None:
    trajectory = json.loads((golden / "trajectories" / "trajectories.json").read_text())[run]
    samples = np.load(golden / "datasets" / "golden_A_single_lt1epoch.npz")["train_samples"]
    window = torch.from_numpy(samples[:8].astype(np.int64))  # one global batch
    model = load(dict(np.load(golden / "trajectories" / initial)), base)

    with torch.no_grad():
        loss = model(window[:, :-1], window[:, 1:]).loss_sum / window[:, 1:].numel()

    expected = trajectory["steps"][0]["loss"]["lm loss"]
    assert loss.item() == pytest.approx(expected, abs=TOLERANCES["golden_loss_float32"])
