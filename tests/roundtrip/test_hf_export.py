"""What mds-ckpt exports is what transformers and mds-core mean: weights bitwise, logits to 1e-5.

Weights have a standard deviation of 0.2: barely trained models hide wrong conversions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mds_ckpt import commit, convert, open_checkpoint  # noqa: E402
from mds_ckpt.families import choose  # noqa: E402
from mds_ckpt.formats.mds import add_file, merge_rank_files, write_rank_file  # noqa: E402
from mds_ckpt.manifest import CheckpointManifest, ModelRecord  # noqa: E402
from mds_core.bert_config import BertConfig  # noqa: E402
from mds_core.config import GPTConfig  # noqa: E402
from mds_core.groups import ProcessGroups  # noqa: E402
from mds_core.models import GPT, Bert  # noqa: E402

LOGITS = 1e-5
"""Absolute, as numerics.md has it."""
BASE = {
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 61,
    "max_position_embeddings": 48,
}
LLAMA = BASE | {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "ffn_hidden_size": 40,
    "position_embedding": "rope",
    "rope_theta": 5000.0,
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias": False,
    "tie_embeddings": False,
}
BLOOM = BASE | {"position_embedding": "alibi", "embedding_norm": True, "activation": "gelu_tanh"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": BASE | {"activation": "gelu_tanh"},
    "gpt2 erf": BASE | {"activation": "gelu", "ffn_hidden_size": 40, "norm_epsilon": 1e-6},
    "gpt2 untied": BASE | {"activation": "relu", "tie_embeddings": False},
    "llama": LLAMA,
    "llama tied, biased": LLAMA | {"tie_embeddings": True, "add_bias": True, "head_dim": 8},
    "llama geglu": LLAMA | {"activation": "geglu_tanh", "num_key_value_heads": 1},
    "mistral": LLAMA | {"sliding_window": 5},
    "qwen2": LLAMA | {"add_qkv_bias": True, "head_dim": 8, "tie_embeddings": True},
    "qwen3": LLAMA | {"qk_norm": True, "head_dim": 16, "norm_epsilon": 1e-6},
    "mixtral": LLAMA | {"num_experts": 5, "moe_topk": 2, "moe_normalize_gates": True},
    "mixtral sliding": LLAMA | {"num_experts": 2, "moe_topk": 2, "sliding_window": 5},
    "gptneox": BASE
    | {"position_embedding": "rope", "rope_percent": 0.5, "parallel_residual": True}
    | {"tie_embeddings": False, "ffn_hidden_size": 40, "rope_theta": 5000.0},
    "gptneox serial, tanh": BASE | {"position_embedding": "rope", "activation": "gelu_tanh"},
    "bloom": BLOOM,
    "bloom post-LN": BLOOM | {"residual_post_layernorm": True, "tie_embeddings": False},
}
TOKENS = torch.from_numpy(np.random.default_rng(1).integers(0, 61, (2, 24)))


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def save(
    root: Path,
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    *,
    family: str = "gpt",
    **files: bytes,
) -> Path:
    """A checkpoint as two ranks write it, each with half the elements of every parameter."""
    model = ModelRecord(
        family=family,
        config=config,
        vocab_size=config["vocab_size"],
        tied_embeddings=config.get("tie_embeddings", True),
    )
    partial = commit.stage(root, 1)
    rank_files = []
    for rank in (0, 1):
        pieces = []
        for name, array in weights.items():
            half = array.size // 2
            span = (0, half) if rank == 0 else (half, array.size)
            box = tuple((0, extent) for extent in array.shape)
            pieces.append((name, "weight", box, span, array.reshape(-1)[slice(*span)]))
        rank_files.append(write_rank_file(partial, rank, pieces))
    shapes = {name: array.shape for name, array in weights.items()}
    parameters, records = merge_rank_files(shapes, rank_files)
    for stem, content in files.items():
        records[f"{stem}.json"] = add_file(partial, f"{stem}.json", content)
    manifest = CheckpointManifest(
        producer={"name": "test", "version": "1"},
        step=1,
        counters={"iteration": 1},
        model=model,
        parameters=parameters,
        files=records,
    )
    return commit.publish(partial, manifest, root=root)


def random_weights(config: dict[str, Any], *, seed: int = 0) -> dict[str, np.ndarray]:
    model = ModelRecord(
        family="gpt",
        config=config,
        vocab_size=config["vocab_size"],
        tied_embeddings=config.get("tie_embeddings", True),
    )
    random = np.random.default_rng(seed)
    return {
        rule.canonical.name: (random.standard_normal(rule.canonical.shape) * 0.2).astype("f4")
        for rule in choose(model).rules(model)
    }


BERTS = ("BertForPreTraining", "BertForMaskedLM", "BertModel", "MegatronBertForPreTraining")


@pytest.mark.parametrize("name", BERTS)
def test_a_bert_of_transformers_goes_through_megatron_and_back(name: str, tmp_path: Path) -> None:
    model_class = getattr(transformers, name)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = model_class.config_class(vocab_size=50, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "hf")

    convert(tmp_path / "hf", tmp_path / "megatron", to="megatron", tp=2)
    convert(tmp_path / "megatron", tmp_path / "back", to="hf", vocab_size=50)
    back, report = model_class.from_pretrained(tmp_path / "back", output_loading_info=True)

    assert not any(report.values()), report
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key
    tokens = TOKENS % 50
    with torch.no_grad():
        found, expected = back.eval()(tokens), model(tokens)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("post", [True, False])
def test_scores_of_berts_equal_those_of_mds_core(post: bool, tmp_path: Path) -> None:
    config = BASE | {"residual_post_layernorm": post, "norm_epsilon": 1e-12, "num_token_types": 3}
    record = ModelRecord(family="bert", config=config, vocab_size=61, tied_embeddings=True)
    random = np.random.default_rng(0)
    weights = {
        rule.canonical.name: (random.standard_normal(rule.canonical.shape) * 0.2).astype("f4")
        for rule in choose(record).rules(record)
    }
    convert(save(tmp_path / "ckpt", config, weights, family="bert"), tmp_path / "hf", to="hf")
    ours = Bert(BertConfig(**config), ProcessGroups.single()).eval()
    assert {name for name, _ in ours.named_parameters()} == set(weights)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.zero_()
            array = weights[name]
            parameter[tuple(slice(extent) for extent in array.shape)] = torch.from_numpy(array)
    theirs = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "hf").eval()
    types = torch.from_numpy(np.random.default_rng(2).integers(0, 3, (2, 24)))

    with torch.no_grad():
        expected, found = theirs(TOKENS, token_type_ids=types), ours(TOKENS, token_types=types)

    assert expected.prediction_logits.std() > 0.1
    assert (found.words - expected.prediction_logits).abs().max() < LOGITS
    assert (found.binary - expected.seq_relationship_logits).abs().max() < LOGITS


def load(folder: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    return model.eval()


def test_transformers_loads_every_weight_bit_for_bit(kind: str, tmp_path: Path) -> None:
    weights = random_weights(MODELS[kind])
    convert(save(tmp_path / "ckpt", MODELS[kind], weights), tmp_path / "hf", to="hf")

    model = load(tmp_path / "hf")
    model.save_pretrained(tmp_path / "again")

    assert type(model).__name__.lower().startswith(kind.split()[0])
    again = open_checkpoint(tmp_path / "again")
    assert set(again.tensors) == set(weights)
    for name, array in weights.items():
        assert np.array_equal(again.tensors[name].numpy(), array), name


def test_logits_of_transformers_equal_those_of_mds_core(kind: str, tmp_path: Path) -> None:
    config = MODELS[kind]
    weights = random_weights(config)
    source = save(tmp_path / "ckpt", config, weights)
    convert(source, tmp_path / "hf", to="hf")
    ours = GPT(GPTConfig(**config), ProcessGroups.single())
    parameters = dict(ours.named_parameters())
    assert set(parameters) == set(weights)
    with torch.no_grad():
        for name, parameter in parameters.items():
            array = open_checkpoint(source).tensors[name].numpy()
            parameter.zero_()
            parameter[tuple(slice(extent) for extent in array.shape)] = torch.from_numpy(array)

        expected = load(tmp_path / "hf")(TOKENS).logits
        found = ours.eval()(TOKENS)

    assert found.shape == expected.shape
    assert expected.std() > 0.1, "weights too small to tell conversions apart"
    assert (found - expected).abs().max() < LOGITS


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_narrower_type_is_loaded_as_such(dtype: str, tmp_path: Path) -> None:
    source = save(tmp_path / "ckpt", LLAMA, random_weights(LLAMA))

    convert(source, tmp_path / "hf", to="hf", dtype=dtype)

    wanted = {"BF16": torch.bfloat16, "F16": torch.float16}[dtype]
    assert {p.dtype for p in load(tmp_path / "hf").parameters()} == {wanted}


def test_the_tokenizer_that_travelled_along_is_loaded(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator(["a small text of words, a text of small words"] * 9, trainer)
    config = BASE | {"vocab_size": tokenizer.get_vocab_size(), "activation": "gelu_tanh"}
    source = save(
        tmp_path / "ckpt", config, random_weights(config), tokenizer=tokenizer.to_str().encode()
    )

    convert(source, tmp_path / "hf", to="hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    text = "a small word"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert loaded.eos_token == "<|endoftext|>"
    model = load(tmp_path / "hf")
    assert model.config.eos_token_id == loaded.eos_token_id
    assert model.generation_config.eos_token_id == loaded.eos_token_id
    out = model.generate(**loaded(text, return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 1


@pytest.mark.parametrize(
    ("config_class", "members"),
    [
        ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}),
        ("LlamaConfig", {"num_key_value_heads": 2}),
        ("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 6}),
        ("Qwen2Config", {"num_key_value_heads": 2}),
        ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 8}),
        ("MixtralConfig", {"num_key_value_heads": 2, "num_local_experts": 3, "head_dim": 4}),
        ("GPTNeoXConfig", {"use_parallel_residual": False}),
        ("GPTNeoXConfig", {"rotary_pct": 0.5}),
        ("BloomConfig", {"apply_residual_connection_post_layernorm": True}),
    ],
)
def test_a_model_of_transformers_goes_through_mds_and_back(
    config_class: str, members: dict[str, Any], tmp_path: Path
) -> None:
    if config_class != "GPT2Config":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        members = sizes | {"num_attention_heads": 4} | members
    if config_class == "BloomConfig":
        members = {"hidden_size": 16, "n_layer": 2, "n_head": 4}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(vocab_size=50, **members)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "hf", max_shard_size="8KB")

    convert(tmp_path / "hf", tmp_path / "mds", to="mds")
    convert(tmp_path / "mds", tmp_path / "back", to="hf")
    back = load(tmp_path / "back")

    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    tokens = TOKENS % 50
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, model(tokens).logits)
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    after = json.loads((tmp_path / "back" / "config.json").read_text())
    before.pop("n_inner", None)  # null is written out
    assert {key: after.get(key) for key in before} == before
