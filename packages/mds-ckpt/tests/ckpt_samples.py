"""Small random checkpoints in our format, for every family, written as two ranks would do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mds_ckpt import commit
from mds_ckpt.families import choose
from mds_ckpt.formats.mds import add_file, merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord

LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "mixtral")
BERTS = ("bert", "megatron-bert")
FAMILIES = ("gpt2", *LLAMAS, "gpt_neox", "bloom", *BERTS)
TOKENIZER = (
    b'{"version":"1.0","added_tokens":[{"id":0,"content":"<|endoftext|>","special":true}],'
    b'"model":{"type":"BPE","vocab":{"<|endoftext|>":0},"merges":[]}}'
)


def config(family: str, **changes: Any) -> dict[str, Any]:
    """A tiny model's configuration, by mds-core's field names."""
    members: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "vocab_size": 37,
        "max_position_embeddings": 32,
    }
    if family in ("gpt2", "bloom"):
        members["activation"] = "gelu_tanh"
    if family in LLAMAS:
        members |= {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "ffn_hidden_size": 24,
            "position_embedding": "rope",
            "normalization": "rmsnorm",
            "activation": "swiglu",
            "add_bias": False,
            "tie_embeddings": False,
        }
    if family == "mixtral":
        members |= {"num_experts": 3, "moe_topk": 2, "moe_normalize_gates": True}
    if family == "gpt_neox":
        members |= {"position_embedding": "rope", "rope_percent": 0.5, "parallel_residual": True}
        members |= {"tie_embeddings": False, "ffn_hidden_size": 24}
    if family == "bloom":
        members |= {"position_embedding": "alibi", "embedding_norm": True}
    if family in BERTS:
        members |= {"residual_post_layernorm": family == "bert", "norm_epsilon": 1e-12}
        members |= {"num_token_types": 3, "binary_head": True, "ffn_hidden_size": 24}
    if family == "mistral":
        members["sliding_window"] = 8
    if family == "qwen2":
        members["add_qkv_bias"] = True
    if family == "qwen3":
        members["qk_norm"] = True
    return members | changes


def model(family: str, **changes: Any) -> ModelRecord:
    members = config(family, **changes)
    return ModelRecord(
        family="bert" if family in BERTS else "gpt",
        config=members,
        vocab_size=members["vocab_size"],
        tied_embeddings=members.get("tie_embeddings", True),
    )


def arrays(record: ModelRecord, *, seed: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    """Random numbers of standard deviation 0.2 for every parameter."""
    random = np.random.default_rng(seed)
    return {
        rule.canonical.name: (random.standard_normal(rule.canonical.shape) * 0.2).astype(dtype)
        for rule in choose(record).rules(record)
    }


def save(
    root: Path,
    record: ModelRecord,
    weights: dict[str, Any],
    *,
    step: int = 1,
    optimizer: bool = False,
    masters: dict[str, Any] | None = None,
    operations: commit.FileOperations = commit.REAL,
    **publish: Any,
) -> Path:
    """Save as two ranks do that cut every parameter at a third of its elements."""
    partial = commit.stage(root, step, operations=operations)
    states = {"weight": weights}
    if optimizer:
        states["exp_avg"] = {name: array * 0.5 for name, array in weights.items()}
    if masters is not None:
        states["master"] = masters
    rank_files = []
    for rank in (0, 1):
        pieces = []
        for state, tensors in states.items():
            for name, array in tensors.items():
                cut = array.size // 3
                span = (0, cut) if rank == 0 else (cut, array.size)
                box = tuple((0, extent) for extent in array.shape)
                pieces.append((name, state, box, span, array.reshape(-1)[slice(*span)]))
        rank_files.append(write_rank_file(partial, rank, pieces, operations=operations))
    shapes = {name: array.shape for name, array in weights.items()}
    parameters, files = merge_rank_files(shapes, rank_files)
    files["tokenizer.json"] = add_file(partial, "tokenizer.json", TOKENIZER, operations=operations)
    manifest = CheckpointManifest(
        producer={"name": "mds-train", "version": "0.1.0"},
        step=step,
        counters={"iteration": step, "consumed_samples": 8 * step},
        model=record,
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root, operations=operations, **publish)
