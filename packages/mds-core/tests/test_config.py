from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from core_cells import BLOOM, GPT2, LLAMA_GQA, NEOX, QWEN3
from torch.utils.flop_counter import FlopCounterMode

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.models import GPT
from mds_core.rope_scaling import RopeScaling

PLAIN = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    "config",
    [
        *(GPT2, LLAMA_GQA, QWEN3, NEOX, BLOOM),
        replace(GPT2, normalization="rmsnorm", zero_centered_norm=True, add_bias=False),
        replace(GPT2, qk_norm=True, tie_embeddings=False, position_embedding="none"),
        replace(LLAMA_GQA, num_key_value_heads=1, add_qkv_bias=True, activation="relu2"),
    ],
)
def test_the_parameter_count_is_that_of_the_built_model(config) -> None:
    model = GPT(config, ProcessGroups.single(), device="meta")

    shards = model.parameter_shards().values()

    assert config.num_params() == sum(torch.Size(shard.global_shape).numel() for shard in shards)


@pytest.mark.parametrize("config", [GPT2, LLAMA_GQA, QWEN3])
def test_flops_are_those_of_the_matrix_products_that_run(config) -> None:
    length = 16
    model = GPT(config, ProcessGroups.single(), execution=Execution(attention_kernel="math"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.int64))

    # The head ran with padded rows and attention over all pairs; the config counts neither.
    padding = config.padded_vocab_size() - config.vocab_size
    window = config.sliding_window or length
    visible = sum(min(position + 1, window) for position in range(length))
    wide = 4 * config.num_attention_heads * config.channels * config.num_layers
    surplus = 2 * length * padding * config.hidden_size + wide * (length**2 - visible)
    assert config.flops_per_token(length) * length == 3 * (counter.get_total_flops() - surplus)


def test_flops_of_gpt3_follow_from_its_published_shape() -> None:
    config = GPTConfig(
        num_layers=96,
        hidden_size=12288,
        num_attention_heads=96,
        vocab_size=50257,
        max_position_embeddings=2048,
    )

    assert config.num_params() == pytest.approx(174.6e9, rel=1e-3)
    assert config.flops_per_token(2048) == pytest.approx(6 * 174.6e9, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, r"hidden_size \(30\) is not a multiple of num_attention_heads"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is not a multiple of num_key"),
        ({"num_layers": 0}, r"num_layers \(0\) must be at least 1"),
        ({"vocab_size": 1.5}, r"vocab_size \(1.5\) must be a whole number"),
        ({"num_layers": True}, r"num_layers \(True\) must be a whole number"),
        ({"activation": "gelo"}, r"activation \('gelo'\) is unknown; choose one of gelu, "),
        ({"normalization": "none"}, r"normalization \('none'\) is unknown"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout \(1.0\) must be at least 0 and less than 1"),
        ({"rope_percent": 0.0}, r"rope_percent \(0.0\) must be above 0"),
        ({"init_std": 0.0}, r"init_std \(0.0\) must be above 0"),
        ({"norm_epsilon": float("nan")}, r"norm_epsilon \(nan\) must be above 0"),
        ({"position_embedding": "rope", "rope_percent": 0.4}, "rotation needs pairs"),
        (
            {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
            r"stretches rotary positions, but position_embedding is 'learned'",
        ),
        (
            {"parallel_residual": True, "residual_post_layernorm": True},
            "parallel_residual and residual_post_layernorm exclude each other",
        ),
        ({"rope_scaling_factor": 2.0}, "rope_scaling_factor is set without rope_scaling_type"),
    ],
)
def test_an_impossible_value_is_refused_with_its_reason(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**PLAIN | changes)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 8,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


@pytest.mark.parametrize(
    "table",
    [
        LLAMA3,
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4},
    ],
)
def test_a_rope_scaling_table_survives_a_checkpoint(table) -> None:
    given = PLAIN | {"position_embedding": "rope", "rope_scaling": table, "family": "gpt"}

    config = GPTConfig.from_record(given)

    assert config.rope_scaling_type == table["rope_type"]
    assert config.record()["rope_scaling"] == table
    assert GPTConfig.from_record(config.record()) == config.resolved()


def test_the_old_name_of_the_type_and_the_default_type_are_understood() -> None:
    assert RopeScaling.of({"type": "linear", "factor": 2}).rope_type == "linear"
    assert RopeScaling.of({"type": "default"}) is None


def test_an_unset_original_length_is_written_out() -> None:
    config = GPTConfig(
        **PLAIN, position_embedding="rope", rope_scaling_type="yarn", rope_scaling_factor=2.0
    )

    assert config.record()["rope_scaling"]["original_max_position_embeddings"] == 16


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, r"rope_type \('longrope'\) is unknown"),
        ({"rope_type": "linear"}, "rope_type and factor are required"),
        ({"rope_type": "linear", "factor": 2.0, "fast": 1}, r"is not understood: it takes"),
        ({"rope_type": "linear", "factor": 0.5}, r"factor \(0.5\) of rope scaling must be at"),
        ({"rope_type": "linear", "factor": "2"}, r"factor \('2'\) of rope scaling must be a num"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 9.0}, "beta_fast .* has no meaning"),
        (LLAMA3 | {"low_freq_factor": 4.0}, r"llama3 needs low_freq_factor \(4.0\) below"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": False}, "truncate is false"),
    ],
)
def test_an_impossible_rope_scaling_is_refused_with_its_reason(table, message) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling.of(table)


def test_nobody_writes_to_a_config() -> None:
    with pytest.raises(FrozenInstanceError):
        GPTConfig(**PLAIN).num_layers = 3


def test_derived_values_are_written_out_on_request() -> None:
    config = GPTConfig(**PLAIN, activation="swiglu").resolved()

    assert (config.num_key_value_heads, config.head_dim, config.add_qkv_bias) == (4, 8, True)
    assert config.ffn_hidden_size == 64
    assert config.resolved() == config


def test_a_gated_mlp_that_rounds_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="give ffn_hidden_size"):
        GPTConfig(**PLAIN | {"hidden_size": 16, "activation": "swiglu"})


@pytest.mark.parametrize(("tp_size", "rows"), [(1, 128), (2, 256), (4, 512)])
def test_the_vocabulary_is_padded_for_every_rank(tp_size, rows) -> None:
    assert GPTConfig(**PLAIN).padded_vocab_size(tp_size) == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 1}, r"num_attention_heads \(1\) is not a multiple of tp_size"),
        (
            {"num_key_value_heads": 1, "head_dim": 7},
            r"num_key_value_heads \(1, of 7 channels\) and tp_size \(2\) do not fit",
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            r"num_key_value_heads \(3, of 8 channels\) and tp_size \(2\) do not fit",
        ),
        ({"ffn_hidden_size": 33}, r"ffn_hidden_size \(33\) is not a multiple of tp_size \(2\)"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**PLAIN | changes).check_tp(2)


def test_heads_that_do_not_divide_by_the_ranks_of_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4\) leaves 2 on each of 2 .* ulysses_size \(4\)"):
        GPTConfig(**PLAIN).check_ulysses(4, tp_size=2)


def test_dropping_attention_weights_and_the_fused_kernel_exclude_each_other() -> None:
    config = GPTConfig(**PLAIN, attention_dropout=0.1)

    with pytest.raises(ValueError, match='attention_kernel="fused" cannot drop attention weights'):
        GPT(config, ProcessGroups.single(), execution=Execution(attention_kernel="fused"))


def test_an_unknown_way_to_compute_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute \('some'\) is unknown; choose one of none"):
        Execution(recompute="some")
