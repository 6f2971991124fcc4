"""GPT-NeoX's own checkpoints, read: DeepSpeed's files, with layer 0 as the embedding.

Tensors, optimizer state and counters are those of the DeepSpeed reader. Of the model, the files
say sizes only; the rest stands in the ``configs`` that GPT-NeoX copies into the folder, or is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.checks import Problem
from mds_ckpt.errors import RejectedError, UnsupportedError, UsageError
from mds_ckpt.formats import Format
from mds_ckpt.read_options import ReadOptions

CONFIGS = "configs"
_MOST_CONFIGS = 64
_WORDS: Mapping[str, tuple[str, ...]] = {
    "position_embedding": ("learned", "rope", "alibi", "none"),
    "activation": ("gelu", "gelu_tanh", "relu", "silu"),
    "parallel_residual": ("true", "false"),
}
_NUMBERS = ("rope_percent", "rope_theta", "norm_epsilon", "max_position_embeddings")
_POSITIONS = {"learned": "learned", "rotary": "rope", "alibi": "alibi", "none": "none"}
_ROW_BIASES = (".self_attention.linear_proj.bias", ".mlp.linear_fc2.bias")
_REMEDY = "this model can't be carried over unchanged"


def find(path: Path) -> Path | None:
    """The folder with the layers' files, at ``path`` or where ``latest`` points."""
    from mds_ckpt.formats import megatron_deepspeed
    from mds_ckpt.megatron.neox_folder import is_gpt_neox

    folder = megatron_deepspeed.find(path)
    return folder if folder is not None and is_gpt_neox(folder) else None


def detect(path: Path) -> bool:
    """Whether its layers begin at 0 or are a sequence's, as only GPT-NeoX's do and are."""
    try:
        return find(path) is not None
    except RejectedError:
        return False


def open_gpt_neox(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a checkpoint of GPT-NeoX, or the newest one of a folder."""
    from mds_ckpt.megatron.deepspeed_reader import read_deepspeed

    folder = find(path)
    if folder is None:
        raise RejectedError(
            path,
            "it has neither a layer 0 nor a model file with 'sequential.0'",
            remedy="name the folder global_stepN",
        )
    asked = options or ReadOptions()
    checkpoint = read_deepspeed(
        folder, replace(asked, qkv_layout=asked.qkv_layout or "grouped", model={})
    )
    said = _checked(asked.model)
    known = _stored_configs(folder)
    config = {**checkpoint.config, **_measured(checkpoint), **_described(folder, known), **said}
    notes = [note for note in checkpoint.notes if not note.startswith("query, key and value rows")]
    needed = ["activation", "parallel_residual"]
    if "embedding.position_embeddings.weight" not in checkpoint.tensors:
        needed.append("position_embedding")
    missing = [name for name in needed if name not in known and name not in said]
    if missing and not known:
        listed = ",".join(f"{name}=VALUE" for name in missing)
        reason = f"no {CONFIGS} folder says {', '.join(missing)}"
        remedy = f"copy it, or say it with --from gpt-neox:{listed}"
        if options is not None:
            raise RejectedError(folder, reason, remedy=remedy)
        notes.append(f"{reason}; {remedy}")
    states = checkpoint.states
    if config.get("parallel_residual") is True and checkpoint.parallel.get("tp", 1) > 1:
        states = {state: _added_up(state, tensors) for state, tensors in states.items()}
        notes.append(
            "biases behind row-parallel linears are the sums over the tensor-parallel ranks: with "
            "parallel residuals, each rank adds its own"
        )
    model = replace(checkpoint.model, config=config)
    return replace(checkpoint, format="gpt-neox", model=model, states=states, notes=tuple(notes))


def _added_up(state: str, tensors: Mapping[str, LazyTensor]) -> Mapping[str, LazyTensor]:
    """With the biases that every rank adds to the output summed; Adam's moments are of each."""
    from mds_ckpt.megatron.assemble import summed

    if state not in ("weight", "master"):
        return tensors
    return {
        name: summed(tensor) if name.endswith(_ROW_BIASES) else tensor
        for name, tensor in tensors.items()
    }


def _checked(said: Mapping[str, Any]) -> dict[str, Any]:
    """What the user says; UsageError for values that make no sense."""
    facts: dict[str, Any] = {}
    for name, value in said.items():
        if name in _WORDS and value not in _WORDS[name]:
            raise UsageError(f"{name}={value} makes no sense; give one of {_WORDS[name]}")
        if name in _NUMBERS and not (type(value) in (int, float) and 0 < value < 1 << 40):
            raise UsageError(f"{name}={value} makes no sense; give a number above 0")
        facts[name] = value == "true" if name == "parallel_residual" else value
    return facts


def _measured(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the tensors say."""
    tensors = checkpoint.tensors
    first = "decoder.layers.0."
    facts: dict[str, Any] = {
        "normalization": "layernorm" if f"{first}input_layernorm.bias" in tensors else "rmsnorm",
        "add_bias": f"{first}mlp.linear_fc1.bias" in tensors,
        "tie_embeddings": checkpoint.model.tied_embeddings,
    }
    if (narrow := tensors.get(f"{first}mlp.linear_fc2.weight")) is not None:
        facts["ffn_hidden_size"] = narrow.shape[1]
    has_bias = f"{first}self_attention.linear_qkv.bias" in tensors
    if has_bias != facts["add_bias"]:
        facts["add_qkv_bias"] = has_bias
    return facts


def _stored_configs(folder: Path) -> dict[str, Any]:
    """All members of the copied configurations; later files win, as in GPT-NeoX."""
    from mds_ckpt.files.plain_yaml import YamlError, parse
    from mds_ckpt.files.regular_file import read_whole

    place = folder / CONFIGS
    if not place.is_dir() or place.is_symlink():
        return {}
    members: dict[str, Any] = {}
    paths = sorted(path for path in place.iterdir() if path.suffix in (".yml", ".yaml"))
    for path in paths[:_MOST_CONFIGS]:
        try:
            found = parse(read_whole(path, limit=1 << 20))
        except YamlError as error:
            raise RejectedError(path, str(error), remedy="correct it, or remove it") from None
        if isinstance(found, dict):
            members |= {str(key).replace("-", "_"): value for key, value in found.items()}
    return members


def _described(folder: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the configurations say, in our words."""
    if not known:
        return {}
    position = known.get("pos_emb", "learned")
    activation = known.get("activation", "gelu")
    if position not in _POSITIONS:
        raise UnsupportedError(folder, f"'pos_emb' is {str(position)[:80]!r}", remedy=_REMEDY)
    if activation not in ("gelu", "relu", "silu", "swish"):
        raise UnsupportedError(folder, f"'activation' is {str(activation)[:80]!r}", remedy=_REMEDY)
    for key in ("gpt_j_tied", "moe_num_experts", "mamba_use_bias_in_conv"):
        if known.get(key) not in (None, False, 1):
            raise UnsupportedError(folder, f"'{key}' is set", remedy=_REMEDY)
    if activation == "gelu" and known.get("bias_gelu_fusion") is True:
        activation = "gelu_tanh"  # the fused kernel computes the tanh form
    facts: dict[str, Any] = {
        "position_embedding": _POSITIONS[position],
        "activation": "silu" if activation == "swish" else activation,
        "parallel_residual": known.get("gpt_j_residual") is True,
    }
    is_rms = known.get("norm") == "rmsnorm"
    numbers = {
        "rope_percent": ("rotary_pct", 1.0),
        "rope_theta": ("rotary_emb_base", 10000),
        "norm_epsilon": ("rms_norm_epsilon", 1e-8) if is_rms else ("layernorm_epsilon", 1e-5),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    }
    for ours, (key, default) in numbers.items():
        value = known.get(key, default)
        if type(value) not in (int, float):
            raise RejectedError(
                folder / CONFIGS, f"'{key}' is not a number", remedy="correct the configuration"
            )
        if facts["position_embedding"] == "rope" or not ours.startswith("rope"):
            facts[ours] = float(value)
    return facts


def check(checkpoint: Checkpoint, data: bool) -> Iterator[Problem]:  # noqa: FBT001
    """As for other DeepSpeed checkpoints."""
    from mds_ckpt.megatron.deepspeed_check import check_deepspeed

    yield from check_deepspeed(checkpoint, data=data)


FORMAT = Format(
    name="gpt-neox",
    title="GPT-NeoX checkpoint",
    detect=detect,
    open=open_gpt_neox,
    check=check,
    answers=(*_WORDS, *_NUMBERS),
)
