"""GPT computes what transformers computes: same weights, same logits.

The maps between the two namings are written here anew, apart from those of mds-ckpt, so that a
mistake in one cannot hide in the other.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers

from mds_core import BertConfig, GPTConfig, ProcessGroups
from mds_core.models import GPT, Bert
from mds_kernels.testing import TOLERANCES

VOCAB, POSITIONS, HIDDEN, HEADS, LAYERS = 131, 32, 48, 6, 2
LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
OURS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "position_embedding": "rope",
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "norm_epsilon": 1e-6,
    "add_bias": False,
    "tie_embeddings": False,
}


def rope(theta: float) -> dict:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def gpt2():
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=POSITIONS,
            n_embd=HIDDEN,
            n_layer=LAYERS,
            n_head=HEADS,
            attn_implementation="eager",
        )
    )
    ours = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        activation="gelu_tanh",
    )
    return theirs, ours, from_gpt2


def llama():
    config = transformers.LlamaConfig(**LLAMA_LIKE, **rope(10000.0))
    return transformers.LlamaForCausalLM(config), GPTConfig(**OURS), from_llama


def llama_mqa_tied():
    changed = {"num_key_value_heads": 1, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**LLAMA_LIKE | changed, **rope(500000.0))
    ours = {"num_key_value_heads": 1, "tie_embeddings": True, "rope_theta": 500000.0}
    return transformers.LlamaForCausalLM(config), GPTConfig(**OURS | ours), from_llama


def neox(*, parallel: bool = True):
    theirs = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=80,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            max_position_embeddings=POSITIONS,
            use_parallel_residual=parallel,
            rope_parameters={
                **rope(10000.0)["rope_parameters"],
                "partial_rotary_factor": 0.25,
            },
            attn_implementation="eager",
        )
    )
    ours = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=80,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        position_embedding="rope",
        rope_percent=0.25,
        parallel_residual=parallel,
        tie_embeddings=False,
    )
    return theirs, ours, partial(renamed, names=NEOX_NAMES)


def neox_serial():
    return neox(parallel=False)


def bloom(*, post_norm: bool = False):
    theirs = transformers.BloomForCausalLM(
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    )
    ours = GPTConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,  # six: not a power of two
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        position_embedding="alibi",
        embedding_norm=True,
        residual_post_layernorm=post_norm,
        activation="gelu_tanh",
    )
    return theirs, ours, partial(renamed, names=BLOOM_NAMES)


def bloom_post_norm():
    return bloom(post_norm=True)


NEOX_NAMES = {
    "gpt_neox.embed_in.": "embedding.word_embeddings.",
    "gpt_neox.layers.": "decoder.layers.",
    "gpt_neox.final_layer_norm.": "decoder.final_layernorm.",
    "lm_head.": "output_layer.",
    ".attention.query_key_value.": ".self_attention.linear_qkv.",
    ".attention.dense.": ".self_attention.linear_proj.",
}
BLOOM_NAMES = {
    "transformer.word_embeddings.": "embedding.word_embeddings.",
    "transformer.word_embeddings_layernorm.": "embedding.layernorm.",
    "transformer.h.": "decoder.layers.",
    "transformer.ln_f.": "decoder.final_layernorm.",
    ".self_attention.query_key_value.": ".self_attention.linear_qkv.",
    ".self_attention.dense.": ".self_attention.linear_proj.",
}
MEGATRON_NAMES = {
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".dense_h_to_4h.": ".linear_fc1.",
    ".dense_4h_to_h.": ".linear_fc2.",
}


def renamed(theirs: dict, config: GPTConfig, *, names: dict[str, str]) -> dict:
    """Both families store queries, keys and values head by head, as we do."""

    def rename(name: str) -> str:
        for old, new in (names | MEGATRON_NAMES).items():
            name = name.replace(old, new)
        return name

    tied = {"lm_head.weight"} if config.tie_embeddings else set()
    return {rename(name): tensor for name, tensor in theirs.items() if name not in tied}


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-betas": {
        "factor": 2.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 6.0,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
    },
    "yarn-mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
    },
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 24,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def scaled(name: str):
    """Llama with stretched positions; both read the same table."""

    def build():
        table = {"rope_type": name.split("-")[0], **SCALINGS[name]}
        # Dynamic scaling begins beyond the trained positions, so here the sequence does, too.
        length = {"max_position_embeddings": 20} if name == "dynamic" else {}
        rotations = {"rope_parameters": table | {"rope_theta": 10000.0}}
        config = transformers.LlamaConfig(**LLAMA_LIKE | length, **rotations)
        ours = GPTConfig.from_record(OURS | length | {"rope_scaling": table})
        return transformers.LlamaForCausalLM(config), ours, from_llama

    build.__name__ = f"llama_{name}"
    return build


def mistral():
    config = transformers.MistralConfig(**LLAMA_LIKE, sliding_window=7, **rope(10000.0))
    return (
        transformers.MistralForCausalLM(config),
        GPTConfig(**OURS, sliding_window=7),
        from_llama,
    )


def mixtral():
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.MixtralConfig(**LLAMA_LIKE, **sizes, **rope(1000000.0))
    ours = GPTConfig(**OURS, num_experts=4, moe_topk=2, rope_theta=1000000.0)
    return transformers.MixtralForCausalLM(config), ours, from_mixtral


def qwen2():
    config = transformers.Qwen2Config(**LLAMA_LIKE, **rope(1000000.0))
    ours = GPTConfig(**OURS, add_qkv_bias=True, rope_theta=1000000.0)
    return transformers.Qwen2ForCausalLM(config), ours, from_llama


def qwen3():
    config = transformers.Qwen3Config(**LLAMA_LIKE, head_dim=16, **rope(1000000.0))
    ours = GPTConfig(**OURS, head_dim=16, qk_norm=True, rope_theta=1000000.0)
    return transformers.Qwen3ForCausalLM(config), ours, from_llama


def from_gpt2(theirs: dict, config: GPTConfig) -> dict:
    ours = {
        "embedding.word_embeddings.weight": theirs["transformer.wte.weight"],
        "embedding.position_embeddings.weight": theirs["transformer.wpe.weight"],
    }
    for kind in ("weight", "bias"):
        ours[f"decoder.final_layernorm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(config.num_layers):
            old, new = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            ours[f"{new}.input_layernorm.{kind}"] = theirs[f"{old}.ln_1.{kind}"]
            ours[f"{new}.pre_mlp_layernorm.{kind}"] = theirs[f"{old}.ln_2.{kind}"]
            # Conv1D keeps [in, out]; its columns are all queries, all keys, all values.
            query, key, value = transposed(theirs[f"{old}.attn.c_attn.{kind}"]).chunk(3)
            ours[f"{new}.self_attention.linear_qkv.{kind}"] = grouped(query, key, value, config)
            for a, b in (
                ("attn.c_proj", "self_attention.linear_proj"),
                ("mlp.c_fc", "mlp.linear_fc1"),
                ("mlp.c_proj", "mlp.linear_fc2"),
            ):
                ours[f"{new}.{b}.{kind}"] = transposed(theirs[f"{old}.{a}.{kind}"])
    return ours


def transposed(tensor):
    return tensor.mT if tensor.dim() == 2 else tensor


def from_mixtral(theirs: dict, config: GPTConfig) -> dict:
    """Theirs keeps all experts of a layer in one tensor, [gate; up] as ours."""
    ours, rest = {}, dict(theirs)
    for layer in range(config.num_layers):
        old, new = f"model.layers.{layer}.mlp", f"decoder.layers.{layer}.mlp"
        ours[f"{new}.router.weight"] = rest.pop(f"{old}.gate.weight")
        wide, narrow = (rest.pop(f"{old}.experts.{n}_proj") for n in ("gate_up", "down"))
        for expert in range(config.num_experts):
            own = f"{new}.experts.local_experts.{expert}"
            ours[f"{own}.linear_fc1.weight"] = wide[expert]
            ours[f"{own}.linear_fc2.weight"] = narrow[expert]
        rest |= dict.fromkeys([f"{old}.{n}_proj.weight" for n in ("gate", "up", "down")], wide[0])
    dense = {name: t for name, t in from_llama(rest, config).items() if ".mlp." not in name}
    return dense | ours


def from_llama(theirs: dict, config: GPTConfig) -> dict:
    ours = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
    }
    if not config.tie_embeddings:
        ours["output_layer.weight"] = theirs["lm_head.weight"]
    for layer in range(config.num_layers):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        gate, up = (theirs[f"{old}.mlp.{half}_proj.weight"] for half in ("gate", "up"))
        ours |= {
            f"{new}.input_layernorm.weight": theirs[f"{old}.input_layernorm.weight"],
            f"{new}.pre_mlp_layernorm.weight": theirs[f"{old}.post_attention_layernorm.weight"],
            f"{new}.self_attention.linear_proj.weight": theirs[f"{old}.self_attn.o_proj.weight"],
            f"{new}.mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{new}.mlp.linear_fc2.weight": theirs[f"{old}.mlp.down_proj.weight"],
        }
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            parts = [theirs[f"{old}.self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            ours[f"{new}.self_attention.linear_qkv.{kind}"] = grouped(*parts, config)
        if config.qk_norm:
            for letter in "qk":
                weight = theirs[f"{old}.self_attn.{letter}_norm.weight"]
                ours[f"{new}.self_attention.{letter}_layernorm.weight"] = weight
    return ours


def grouped(query, key, value, config: GPTConfig):
    """Interleave rows so that each key/value head follows its query heads."""
    per_group = config.num_attention_heads // config.kv_heads * config.channels
    rows = []
    for group in range(config.kv_heads):
        rows.append(query[group * per_group : (group + 1) * per_group])
        own = slice(group * config.channels, (group + 1) * config.channels)
        rows += [key[own], value[own]]
    return torch.cat(rows)


FAMILIES = [
    gpt2,
    neox,
    neox_serial,
    bloom,
    llama,
    llama_mqa_tied,
    mistral,
    mixtral,
    qwen2,
    qwen3,
    *map(scaled, SCALINGS),
]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_logits_equal_those_of_transformers(family) -> None:
    torch.manual_seed(0)
    theirs, config, translate = family()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    model = GPT(config, ProcessGroups.single())
    weights = translate(theirs.state_dict(), config)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()[: len(weights[name])] = weights[name]
    tokens = torch.randint(0, VOCAB, (3, POSITIONS))

    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        actual = model.eval()(tokens)

    assert expected.abs().max() > 0.5
    assert config.num_params() == sum(parameter.numel() for parameter in theirs.parameters())
    tolerance = TOLERANCES["transformers_logits_float32"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("tokens_of_padding", [0, 5])
def test_both_scores_of_bert_equal_those_of_transformers(tokens_of_padding) -> None:
    torch.manual_seed(0)
    theirs = transformers.BertForPreTraining(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=80,
            max_position_embeddings=POSITIONS,
            attn_implementation="eager",
        )
    ).eval()
    config = BertConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        ffn_hidden_size=80,
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        norm_epsilon=1e-12,
        residual_post_layernorm=True,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.2)
    model = Bert(config, ProcessGroups.single()).eval()
    weights = from_bert(theirs.state_dict(), config)
    assert set(weights) == {name for name, _ in model.named_parameters()}
    assert config.num_params() == sum(p.numel() for p in theirs.parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.zero_()[: len(weights[name])] = weights[name]
    tokens, types = torch.randint(0, VOCAB, (3, POSITIONS)), torch.randint(0, 2, (3, POSITIONS))
    real = torch.ones(3, POSITIONS, dtype=torch.int64)
    real[1, POSITIONS - tokens_of_padding :] = 0

    with torch.no_grad():
        expected = theirs(tokens, token_type_ids=types, attention_mask=real)
        actual = model(tokens, token_types=types, padding_mask=real.bool())

    tolerance = {"rtol": 0, "atol": TOLERANCES["transformers_logits_float32"]}
    seen = real.bool()
    torch.testing.assert_close(actual.words[seen], expected.prediction_logits[seen], **tolerance)
    torch.testing.assert_close(actual.binary, expected.seq_relationship_logits, **tolerance)


def from_bert(theirs: dict, config: GPTConfig) -> dict:
    """Post-LN moves every norm by one: what follows a layer is the next layer's input norm."""
    ours = {
        f"embedding.{kind}_embeddings.weight": theirs[f"bert.embeddings.{old}_embeddings.weight"]
        for kind, old in (
            *(("word", "word"), ("position", "position")),
            ("tokentype", "token_type"),
        )
    }
    ours["output_layer.bias"] = theirs["cls.predictions.bias"]
    last = f"bert.encoder.layer.{config.num_layers - 1}.output.LayerNorm"
    for kind in ("weight", "bias"):
        for old, new in {
            last: "encoder.final_layernorm",
            "bert.pooler.dense": "pooler.dense",
            "cls.seq_relationship": "binary_head",
            "cls.predictions.transform.dense": "lm_head.dense",
            "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
        }.items():
            ours[f"{new}.{kind}"] = theirs[f"{old}.{kind}"]
        for layer in range(config.num_layers):
            old, new = f"bert.encoder.layer.{layer}", f"encoder.layers.{layer}"
            before = f"bert.encoder.layer.{layer - 1}.output" if layer else "bert.embeddings"
            ours[f"{new}.input_layernorm.{kind}"] = theirs[f"{before}.LayerNorm.{kind}"]
            parts = [theirs[f"{old}.attention.self.{x}.{kind}"] for x in ("query", "key", "value")]
            ours[f"{new}.self_attention.linear_qkv.{kind}"] = grouped(*parts, config)
            for a, b in (
                ("attention.output.dense", "self_attention.linear_proj"),
                ("attention.output.LayerNorm", "pre_mlp_layernorm"),
                ("intermediate.dense", "mlp.linear_fc1"),
                ("output.dense", "mlp.linear_fc2"),
            ):
                ours[f"{new}.{b}.{kind}"] = theirs[f"{old}.{a}.{kind}"]
    return ours
