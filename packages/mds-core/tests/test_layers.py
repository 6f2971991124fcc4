"""Layers on one process against independent, naive references."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from core_cells import LLAMA_GQA
from torch.nn import functional as F

from mds_core.config import GPTConfig
from mds_core.layers import (
    ColumnParallelLinear,
    KVCache,
    Norm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from mds_core.layers.alibi import alibi_mask, alibi_slopes
from mds_core.layers.attention import attention_mask, fused_attention, math_attention
from mds_core.layers.mlp import MLP
from mds_core.layers.rope import apply_rope, rotation
from mds_core.parameter import initialize, parameter_shards


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("layer", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_of_one_rank_is_a_linear_layer(layer, bias) -> None:
    linear = layer(6, 8, bias=bias, dtype=torch.float64)
    initialize(linear, seed=1)
    x = torch.randn(2, 3, 6, dtype=torch.float64)

    assert torch.equal(linear(x), F.linear(x, linear.weight, linear.bias))
    assert linear.weight.std() > 0
    assert not bias or not linear.bias.any()


def test_embedding_looks_up_and_pads() -> None:
    embedding = VocabParallelEmbedding(5, 4, padded_size=8)
    initialize(embedding, seed=1)

    vectors = embedding(torch.tensor([[0, 4]]))

    assert torch.equal(vectors[0], embedding.weight[[0, 4]])
    assert embedding.weight.shape == (8, 4)
    assert not embedding.weight[5:].any()
    assert parameter_shards(embedding)["weight"].ranges == ((0, 5),)


@pytest.mark.parametrize("token", [-1, 5, 7])
def test_a_token_outside_the_vocabulary_is_refused(token) -> None:
    embedding = VocabParallelEmbedding(5, 4, padded_size=8)

    with pytest.raises(ValueError, match="the vocabulary has the ids 0 to 4"):
        embedding(torch.tensor([[0, token]]))


def test_a_padded_size_below_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"padded_size \(4\) must be a multiple of the 1"):
        VocabParallelEmbedding(5, 4, padded_size=4)


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_follow_their_formula(kind, zero_centered) -> None:
    norm = Norm(6, kind=kind, epsilon=1e-3, zero_centered=zero_centered, dtype=torch.float64)
    initialize(norm, seed=1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(6))
    x = torch.randn(4, 6, dtype=torch.float64)

    centred = x - x.mean(-1, keepdim=True) if kind == "layernorm" else x
    factor = norm.weight + 1 if zero_centered else norm.weight
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * factor
    if kind == "layernorm":
        expected = expected + norm.bias

    torch.testing.assert_close(norm(x), expected)


def rotating(channels: int, *, theta: float = 1e4, **scaling) -> GPTConfig:
    return GPTConfig(
        num_layers=1,
        hidden_size=channels,
        num_attention_heads=1,
        vocab_size=8,
        max_position_embeddings=64,
        position_embedding="rope",
        rope_theta=theta,
        **scaling,
    )


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    x = torch.randn(1, 1, 7, 10, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 5, 9, 100, 3]])

    cos, sin = rotation(positions, config=rotating(8, theta=100.0), dtype=torch.float64)
    y = apply_rope(x, cos, sin)

    for column, position in enumerate(positions[0].tolist()):
        for pair in range(4):
            turn = complex(0, position * 100.0 ** (-2 * pair / 8))
            before = complex(x[0, 0, column, pair], x[0, 0, column, pair + 4])
            after = complex(y[0, 0, column, pair], y[0, 0, column, pair + 4])
            assert after == pytest.approx(before * (math.e**turn))
    assert torch.equal(y[..., 8:], x[..., 8:])


def test_angles_are_fp32_for_half_precision_models_and_the_dtype_stays() -> None:
    cos, sin = rotation(torch.arange(5000)[None], config=rotating(8), dtype=torch.bfloat16)

    assert cos.dtype == torch.float32
    assert cos[0, 0, 4999, 0].item() == pytest.approx(math.cos(4999), abs=1e-3)
    x = torch.randn(1, 2, 5000, 8, dtype=torch.bfloat16)
    assert apply_rope(x, cos, sin).dtype == torch.bfloat16


def test_linear_scaling_gives_a_position_the_angles_of_a_fraction_of_it() -> None:
    plain = rotation(torch.arange(32)[None], config=rotating(8), dtype=torch.float64)
    stretched = rotation(
        torch.arange(0, 128, 4)[None],
        config=rotating(8, rope_scaling_type="linear", rope_scaling_factor=4.0),
        dtype=torch.float64,
    )

    torch.testing.assert_close(stretched, plain)


def test_dynamic_scaling_begins_beyond_the_trained_length() -> None:
    config = rotating(8, rope_scaling_type="dynamic", rope_scaling_factor=2.0)
    short, long = torch.arange(64)[None], torch.arange(65)[None]

    plain = rotation(short, config=rotating(8), dtype=torch.float64)
    torch.testing.assert_close(rotation(short, config=config, dtype=torch.float64), plain)
    stretched = rotation(long, config=config, dtype=torch.float64)

    assert (stretched[0][:, :, :64] - plain[0]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling_type": "yarn"},
        {
            "rope_scaling_type": "llama3",
            "rope_scaling_low_freq_factor": 1.0,
            "rope_scaling_high_freq_factor": 4.0,
        },
    ],
)
def test_short_waves_stay_and_long_ones_are_stretched_in_full(scaling) -> None:
    config = rotating(64, **scaling, rope_scaling_factor=8.0, rope_scaling_original_positions=4096)
    one = torch.ones(1, 1, dtype=torch.int64)

    plain = torch.atan2(*rotation(one, config=rotating(64), dtype=torch.float64)[::-1]).flatten()
    cos, sin = rotation(one, config=config, dtype=torch.float64)
    ratio = torch.atan2(sin, cos).flatten() / plain

    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(1 / 8)
    assert (ratio.diff() <= 1e-12).all()


def naive_attention(query, key, value, visible):
    """One head, one query at a time."""
    out = torch.zeros_like(query)
    per_group = query.size(1) // key.size(1)
    for b in range(query.size(0)):
        for head in range(query.size(1)):
            keys, values = key[b, head // per_group], value[b, head // per_group]
            for row in range(query.size(2)):
                seen = [column for column in range(key.size(2)) if visible(b, row, column)]
                scores = keys[seen] @ query[b, head, row] / math.sqrt(query.size(-1))
                out[b, head, row] = scores.softmax(0) @ values[seen]
    return out


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [3, 3, 3, 3, 3, 3, 4, 4]])
MASKS = {
    "causal": ({}, lambda b, row, column: column <= row),
    "window": ({"window": 3}, lambda b, row, column: row - 3 < column <= row),
    "packed": (
        {"documents": DOCUMENTS},
        lambda b, row, column: column <= row and DOCUMENTS[b, row] == DOCUMENTS[b, column],
    ),
    "packed-window": (
        {"documents": DOCUMENTS, "window": 2},
        lambda b, row, column: (
            row - 2 < column <= row and bool(DOCUMENTS[b, row] == DOCUMENTS[b, column])
        ),
    ),
}


@pytest.mark.parametrize("kernel", [fused_attention, math_attention])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_attention_equals_the_naive_loop(kernel, mask, groups) -> None:
    query = torch.randn(2, 4, 8, 6, dtype=torch.float64, requires_grad=True)
    key, value = torch.randn(2, 2, groups, 8, 6, dtype=torch.float64).requires_grad_().unbind()
    settings, visible = MASKS[mask]

    actual = kernel(query, key, value, mask=attention_mask(8, **settings))

    expected = naive_attention(query, key, value, visible)
    torch.testing.assert_close(actual, expected)
    weight = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad((actual * weight).sum(), (query, key, value)),
        torch.autograd.grad((expected * weight).sum(), (query, key, value)),
    )


def test_plain_causal_attention_needs_no_mask() -> None:
    assert attention_mask(8) is None
    assert attention_mask(8, window=8) is None
    assert attention_mask(1, offset=5) is None
    assert attention_mask(2, offset=5).shape == (1, 1, 2, 7)


def test_dropped_attention_weights_are_scaled_to_keep_the_expectation() -> None:
    query, key, value = torch.randn(3, 1, 2, 4, 6, dtype=torch.float64).unbind()
    keep = torch.rand(1, 2, 4, 4) > 0.5

    actual = math_attention(query, key, value, mask=None, keep=keep, probability=0.5)

    scores = query @ key.mT / math.sqrt(6)
    weights = scores.masked_fill(~torch.ones(4, 4).tril().bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(actual, (weights * keep * 2) @ value)


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("gelu", lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2),
        (
            "gelu_tanh",
            lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        ),
        ("relu", lambda x: x.clamp(min=0)),
        ("relu2", lambda x: x.clamp(min=0) ** 2),
        ("silu", lambda x: x * torch.sigmoid(x)),
    ],
)
def test_activations_follow_their_formula(activation, expected) -> None:
    config = replace(LLAMA_GQA, activation=activation)
    mlp = MLP(config, dtype=torch.float64)
    initialize(mlp, seed=1)
    x = torch.randn(2, 3, 32, dtype=torch.float64) * 20

    wide = x @ mlp.linear_fc1.weight.T

    torch.testing.assert_close(mlp(x), expected(wide) @ mlp.linear_fc2.weight.T)


@pytest.mark.parametrize(
    ("activation", "plain"), [("swiglu", "silu"), ("geglu", "gelu"), ("geglu_tanh", "gelu_tanh")]
)
def test_a_gated_mlp_multiplies_the_activated_gate_with_the_up_projection(
    activation, plain
) -> None:
    mlp = MLP(replace(LLAMA_GQA, activation=activation), dtype=torch.float64)
    initialize(mlp, seed=1)
    x = torch.randn(2, 3, 32, dtype=torch.float64)

    gate, up = (x @ half.T for half in mlp.linear_fc1.weight.chunk(2))
    approximate = "tanh" if plain == "gelu_tanh" else "none"
    active = F.silu(gate) if plain == "silu" else F.gelu(gate, approximate=approximate)

    torch.testing.assert_close(mlp(x), (active * up) @ mlp.linear_fc2.weight.T)


def test_a_cache_returns_all_tokens_so_far_and_refuses_more_than_it_holds() -> None:
    cache = KVCache(1, max_length=3, kv_heads=1, channels=2)
    first, second = torch.ones(1, 1, 2, 2), torch.full((1, 1, 1, 2), 2.0)

    cache.append(0, first, first)
    cache.advance(2)
    keys, values = cache.append(0, second, second * 2)

    assert keys[0, 0, :, 0].tolist() == [1, 1, 2]
    assert values[0, 0, :, 0].tolist() == [1, 1, 4]
    with pytest.raises(ValueError, match="the cache holds 3 tokens and 4 are wanted"):
        cache.append(0, first, first)


@pytest.mark.parametrize("attend", [fused_attention, math_attention])
def test_alibi_lowers_the_scores_with_the_distance(attend) -> None:
    query, key, value = torch.randn(3, 1, 3, 6, 8, dtype=torch.float64).unbind(0)
    mask = alibi_mask(6, slopes=alibi_slopes(3), dtype=torch.float64)

    actual = attend(query, key, value, mask=mask)

    for head, slope in enumerate((2**-4, 2**-8, 2**-2)):
        for row in range(6):
            scores = key[0, head, : row + 1] @ query[0, head, row] / math.sqrt(8)
            weights = (scores - slope * (row - torch.arange(row + 1))).softmax(0)
            torch.testing.assert_close(actual[0, head, row], weights @ value[0, head, : row + 1])


def test_alibi_continues_after_a_cache_and_keeps_what_is_hidden_hidden() -> None:
    whole = alibi_mask(6, slopes=alibi_slopes(4))
    assert torch.equal(alibi_mask(2, slopes=alibi_slopes(4), offset=4), whole[:, :, 4:])

    hidden = attention_mask(6, window=2)
    assert torch.equal(alibi_mask(6, slopes=(1.0,), visible=hidden).isinf(), ~hidden)
