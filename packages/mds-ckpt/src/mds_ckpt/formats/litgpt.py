"""LitGPT folders, read: ``lit_model.pth`` beside ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_ckpt import companions
from mds_ckpt.checkpoint import Checkpoint
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.read_options import ReadOptions

if TYPE_CHECKING:
    from mds_ckpt.families.rule import Rule
    from mds_ckpt.manifest import ModelRecord
    from mds_ckpt.stored import Stored

MODEL, CONFIG = "lit_model.pth", "model_config.yaml"
_FALSE = ("post_attention_norm", "post_mlp_norm", "shared_attention_norm", "rope_interleave")
_NONE = ("latent_attention", "first_k_dense_replace", "rope_indices", "rope_local_base_freq")
_MORE_FALSE = ("scale_embeddings", "lm_head_bias")
_MORE_NONE = ("attention_logit_softcapping", "final_logit_softcapping", "attention_scores_scalar")
_MLPS = {"LLaMAMLP": "swiglu", "GptNeoxMLP": "gelu", "LLaMAMoE": "swiglu"}
_PARTS = ("weight", "bias")


def detect(path: Path) -> bool:
    """Whether it is a folder with the two files."""
    return (path / MODEL).is_file() and (path / CONFIG).is_file()


def open_litgpt(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a LitGPT folder; tensors get canonical names and layouts when they are read."""
    refuse_read_options(options, "litgpt")
    from mds_ckpt.files.regular_file import read_whole
    from mds_ckpt.pickles.archive import open_torch_file
    from mds_ckpt.stored import canonical_tensors, torch_tensors

    config = _parsed(path / CONFIG, read_whole(path / CONFIG, limit=1 << 20, cache_links=True))
    file = open_torch_file(path / MODEL)
    state = file.value.get("model", file.value) if isinstance(file.value, dict) else file.value
    stored = torch_tensors(file, state)
    try:
        model = _model(config, options or ReadOptions())
    except ValueError as error:
        raise UnsupportedError(
            path / CONFIG, str(error), remedy="this model can't be carried over unchanged"
        ) from None
    stored, notes = _tied(model, stored)
    model = replace(model, tied_embeddings="lm_head.weight" not in stored)
    model = replace(model, config={**model.config, "tie_embeddings": model.tied_embeddings})
    is_old = any(".attn.attn." in name for name in stored)
    rules = list(_rules(model, is_old=is_old))
    tensors, unused = canonical_tensors(path, rules, stored, config_name=CONFIG)
    for name, part in unused.items():
        raise RejectedError(
            part.path, f"the model of {CONFIG} has none of it", remedy="correct it", tensor=name
        )
    return Checkpoint(
        path=path,
        format="litgpt",
        model=model,
        states={"weight": tensors},
        companions=companions.find(path),
        notes=tuple(notes),
    )


def _parsed(path: Path, data: bytes) -> Mapping[str, Any]:
    from mds_ckpt.files.plain_yaml import YamlError, parse

    try:
        config = parse(data)
    except YamlError as error:
        raise RejectedError(path, str(error), remedy="copy the file again") from None
    if not isinstance(config, dict):
        raise RejectedError(path, "it is not a mapping", remedy="copy the file again")
    return config


def _model(config: Mapping[str, Any], options: ReadOptions) -> ModelRecord:
    """The model of a configuration; ValueError for what ours can't express."""
    from mds_ckpt.families.rule import flag, number, whole_number
    from mds_ckpt.manifest import ModelRecord

    mlp = config.get("mlp_class_name", "GptNeoxMLP")
    _refuse_strange(config, mlp)
    biased = flag(config, "bias", default=True)
    padded = whole_number(config, "padded_vocab_size")
    words = options.vocab_size or min(padded, whole_number(config, "vocab_size"))
    members: dict[str, Any] = {
        **_sizes(config),
        "vocab_size": words,
        "position_embedding": "rope",
        "rope_theta": number(config, "rope_base", 10000.0),
        "activation": _activation(config, mlp),
        "normalization": _norm(config),
        "norm_epsilon": number(config, "norm_eps", 1e-5),
        "add_bias": biased,
        "add_qkv_bias": biased or flag(config, "attn_bias", default=False),
        "parallel_residual": flag(config, "parallel_residual", default=True),
        "qk_norm": flag(config, "norm_qk", default=False),
        "sliding_window": config.get("sliding_window_size"),
        **_rotation(config),
        **_experts(config, mlp),
    }
    if members["qk_norm"] and config.get("norm_qk_type", "default") != "default":
        raise ValueError("'norm_qk_type' is not 'default', which our model does not have")
    return ModelRecord(
        family="gpt",
        config=members,
        vocab_size=words,
        padded_vocab_size=padded if padded != words else None,
        tied_embeddings=False,
    )


def _refuse_strange(config: Mapping[str, Any], mlp: Any) -> None:
    """ValueError for a setting that changes the model to one that ours is not."""
    strange = [key for key in (*_FALSE, *_MORE_FALSE) if config.get(key)]
    strange += [key for key in (*_NONE, *_MORE_NONE) if config.get(key) is not None]
    if strange:
        raise ValueError(f"'{strange[0]}' is set, which our model does not have")
    if not (config.get("norm_1", True) and config.get("norm_2", True)):
        raise ValueError("it lacks a norm that our layers have")
    if mlp not in _MLPS:
        raise ValueError(f"'mlp_class_name' is {mlp!r:.80}, which we don't have")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    from mds_ckpt.families.rule import MOST_LAYERS, whole_number

    hidden, heads = whole_number(config, "n_embd"), whole_number(config, "n_head")
    has = {key for key in config if config[key] is not None}
    sizes = {
        "num_layers": whole_number(config, "n_layer", most=MOST_LAYERS),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "ffn_hidden_size": 4 * hidden,
        "max_position_embeddings": whole_number(config, "block_size"),
    }
    optional = {
        "num_key_value_heads": "n_query_groups",
        "ffn_hidden_size": "intermediate_size",
        "head_dim": "head_size",
    }
    return sizes | {
        ours: whole_number(config, theirs) for ours, theirs in optional.items() if theirs in has
    }


def _norm(config: Mapping[str, Any]) -> str:
    name = config.get("norm_class_name", "LayerNorm")
    if name not in ("LayerNorm", "RMSNorm"):
        raise ValueError(f"'norm_class_name' is {name!r:.80}, which we don't have")
    return str(name).lower()


def _activation(config: Mapping[str, Any], mlp: str) -> str:
    approximate = config.get("gelu_approximate", "none")
    return "gelu_tanh" if mlp == "GptNeoxMLP" and approximate == "tanh" else _MLPS[mlp]


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    from mds_ckpt.families.rule import number

    members: dict[str, Any] = {}
    share = number(config, "rotary_percentage", 0.25)
    if share != 1.0:
        members["rope_percent"] = share
    stretched = config.get("rope_adjustments")
    factor = number(config, "rope_condense_ratio", 1)
    if factor != 1.0:
        members["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if stretched is None:
        return members
    keys = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if not isinstance(stretched, dict) or set(stretched) != keys or factor != 1.0:
        raise ValueError("'rope_adjustments' is not that of Llama 3")
    length = stretched["original_max_seq_len"]
    rest = {key: stretched[key] for key in sorted(keys - {"original_max_seq_len"})}
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": length, **rest}
    return {**members, "rope_scaling": scaling}


def _experts(config: Mapping[str, Any], mlp: str) -> dict[str, Any]:
    from mds_ckpt.families.rule import whole_number

    if mlp != "LLaMAMoE":
        return {}
    for key in ("n_shared_expert", "n_expert_groups", "n_topk_groups"):
        if config.get(key) is not None:
            raise ValueError(f"'{key}' is set, which our experts do not have")
    members: dict[str, Any] = {
        "num_experts": whole_number(config, "n_expert"),
        "moe_topk": whole_number(config, "n_expert_per_token"),
        "moe_normalize_gates": True,
    }
    if config.get("moe_intermediate_size") is not None:
        members["moe_ffn_hidden_size"] = whole_number(config, "moe_intermediate_size")
    return members


def _tied(
    model: ModelRecord, stored: Mapping[str, Stored]
) -> tuple[dict[str, Stored], Sequence[str]]:
    """The tensors without a head that repeats the embedding, and a sentence about it."""
    from mds_ckpt.stored import values

    kept = dict(stored)
    head, words = stored.get("lm_head.weight"), stored.get("transformer.wte.weight")
    if head is None or words is None or (head.dtype, head.shape) != (words.dtype, words.shape):
        return kept, ()
    if values(head).tobytes() != values(words).tobytes():
        return kept, ()
    kept.pop("lm_head.weight")
    return kept, ("lm_head.weight was dropped: it is the embedding again",)


def _rules(model: ModelRecord, *, is_old: bool) -> Iterator[Rule]:
    """All tensors. Old files have query, key and value rows grouped, under another name."""
    from mds_ckpt.families.rule import Shape, same

    shape, config = Shape.of(model), model.config
    h, norms = shape.hidden, _PARTS if config["normalization"] == "layernorm" else _PARTS[:1]
    words = (shape.vocab, h)
    yield same("embedding.word_embeddings.weight", "transformer.wte.weight", *words)
    if not model.tied_embeddings:
        yield same("output_layer.weight", "lm_head.weight", *words)
    for part in norms:
        yield same(f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}", h)
    for layer in range(shape.layers):
        ours, theirs = f"decoder.layers.{layer}", f"transformer.h.{layer}"
        for part in norms:
            yield same(f"{ours}.input_layernorm.{part}", f"{theirs}.norm_1.{part}", h)
            yield same(f"{ours}.pre_mlp_layernorm.{part}", f"{theirs}.norm_2.{part}", h)
        yield from _attention_rules(model, ours, theirs, is_old=is_old)
        if config.get("num_experts"):
            yield from _expert_rules(model, f"{ours}.mlp", f"{theirs}.mlp")
        else:
            yield from _mlp_rules(model, f"{ours}.mlp", f"{theirs}.mlp", shape.width)


def _attention_rules(model: ModelRecord, ours: str, theirs: str, *, is_old: bool) -> Iterator[Rule]:
    from mds_ckpt.families.change import Fused, Grouped, Same
    from mds_ckpt.families.rule import Rule, Shape, Target, same

    shape, config = Shape.of(model), model.config
    inner = shape.heads * shape.channels
    grouped = Grouped(shape.groups, shape.heads // shape.groups, shape.channels)
    fused = f"{theirs}.attn.attn" if is_old else f"{theirs}.attn.qkv"
    for part in _PARTS if config["add_qkv_bias"] else _PARTS[:1]:
        size = (shape.qkv_rows, shape.hidden) if part == "weight" else (shape.qkv_rows,)
        yield Rule(
            Target(f"{ours}.self_attention.linear_qkv.{part}", size),
            (Target(f"{fused}.{part}", size),),
            Same() if is_old else Fused(grouped),
        )
    proj = f"{ours}.self_attention.linear_proj"
    yield same(f"{proj}.weight", f"{theirs}.attn.proj.weight", shape.hidden, inner)
    if config["add_bias"]:
        yield same(f"{proj}.bias", f"{theirs}.attn.proj.bias", shape.hidden)
    for letter in "qk" if config["qk_norm"] else "":
        name = f"{ours}.self_attention.{letter}_layernorm.weight"
        yield same(name, f"{theirs}.attn.norm_{letter}.weight", shape.channels)


def _mlp_rules(model: ModelRecord, ours: str, theirs: str, width: int) -> Iterator[Rule]:
    from mds_ckpt.families.change import Stacked
    from mds_ckpt.families.rule import Rule, Target, same

    h = model.config["hidden_size"]
    for part in _PARTS if model.config["add_bias"] else _PARTS[:1]:
        wide = (width, h) if part == "weight" else (width,)
        if model.config["activation"] == "swiglu":
            halves = tuple(Target(f"{theirs}.fc_{n}.{part}", wide) for n in (1, 2))
            both = (2 * width, *wide[1:])
            yield Rule(Target(f"{ours}.linear_fc1.{part}", both), halves, Stacked())
        else:
            yield same(f"{ours}.linear_fc1.{part}", f"{theirs}.fc.{part}", *wide)
        narrow = (h, width) if part == "weight" else (h,)
        yield same(f"{ours}.linear_fc2.{part}", f"{theirs}.proj.{part}", *narrow)


def _expert_rules(model: ModelRecord, ours: str, theirs: str) -> Iterator[Rule]:
    from mds_ckpt.families.rule import Shape, same

    config = model.config
    width = config.get("moe_ffn_hidden_size") or Shape.of(model).width
    count = config["num_experts"]
    yield same(f"{ours}.router.weight", f"{theirs}.gate.weight", count, config["hidden_size"])
    for number in range(count):
        inner = f"{ours}.experts.local_experts.{number}"
        yield from _mlp_rules(model, inner, f"{theirs}.experts.{number}", width)


FORMAT = Format(name="litgpt", title="LitGPT folder", detect=detect, open=open_litgpt)
