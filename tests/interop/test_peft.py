"""The peft library loads our adapters, and ours adds its: logits equal both ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mds_data import write_store
from mds_kernels.testing import run_ranks
from mds_train import train
from mds_train.config import (
    CheckpointConfig,
    DataConfig,
    LoopConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from mds_train.finetune.adapter import merge_adapter
from mds_train.generate import load_model
from mds_train.model_source import folder_to_load, open_model

peft = pytest.importorskip("peft", reason="session interop installs peft")
pytestmark = pytest.mark.timeout(300)

VOCABULARY, POSITIONS = 101, 32
TOKENS = torch.arange(40).view(2, 20) * 13 % VOCABULARY
TOLERANCE = 1e-5
"""Of fp32 logits: what numerics.md allows beside transformers."""


def llama() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=POSITIONS, n_embd=48, n_layer=2, n_head=4
    )
    return transformers.GPT2LMHeadModel(config)


def neox() -> transformers.PreTrainedModel:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    return transformers.GPTNeoXForCausalLM(config)


def qwen3() -> transformers.PreTrainedModel:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config)


MODELS = {"llama": llama, "gpt2": gpt2, "neox": neox, "qwen3": qwen3}


@pytest.fixture(params=MODELS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of transformers, weights of standard deviation 0.2."""
    torch.manual_seed(3)
    model = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model.eval()(TOKENS)
    return found if isinstance(found, torch.Tensor) else found.logits


def plain(base: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def lora_run(base: Path, folder: Path) -> TrainConfig:
    random = np.random.default_rng(7)
    documents = [random.integers(0, VOCABULARY, 40) for _ in range(40)]
    write_store(folder / "store", documents, vocab_size=VOCABULARY, eod_id=0)
    model = ModelConfig.from_record(open_model(base).config)
    return TrainConfig(
        model=replace(model, hidden_dropout=0.0, attention_dropout=0.0),
        data=DataConfig(store=str(folder / "store"), seq_length=16, split="100,0,0"),
        train=LoopConfig(run_dir=str(folder / "run"), train_steps=4, global_batch_size=4),
        optimizer=OptimizerConfig(lr=2e-2),
        lora=LoraConfig(rank=4, alpha=8.0),
        checkpoint=CheckpointConfig(load=str(folder_to_load(str(base))), load_weights_only=True),
    )


def test_peft_loads_what_we_trained(base: Path, tmp_path: Path) -> None:
    run_ranks(train, 1, lora_run(base, tmp_path), timeout=200)

    merged = merge_adapter(tmp_path / "run")

    ours = logits(load_model(tmp_path / "run"))
    theirs = peft.PeftModel.from_pretrained(plain(base), tmp_path / "run" / "adapter")
    assert (logits(theirs) - logits(plain(base))).abs().max() > 0.05
    torch.testing.assert_close(logits(theirs), ours, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits(plain(merged)), ours, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": "all-linear"},
        {"use_rslora": True, "alpha_pattern": {"some": 32}},
    ],
    ids=["all", "scaled"],
)
def test_we_add_what_peft_trained(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    model = plain(base)
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **_named(options, model))
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "adapter")

    ours = load_model(base, adapter=tmp_path / "adapter")
    alone = load_model(tmp_path / "adapter")

    assert (logits(theirs) - logits(plain(base))).abs().max() > 0.05
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=0, atol=TOLERANCE)
    assert torch.equal(logits(alone), logits(ours))


def _named(options: dict[str, Any], model: Any) -> dict[str, Any]:
    """The family's own layer where one is to have another scale; peft's own targets otherwise."""
    if "alpha_pattern" not in options:
        return options
    layers = {"llama": "q_proj", "qwen3": "q_proj", "gpt2": "c_fc", "gpt_neox": "dense"}
    layer = layers[model.config.model_type]
    return options | {"alpha_pattern": {layer: 32}, "target_modules": [layer]}
