"""The golden fixtures of Megatron-DeepSpeed, and its initial weights as a checkpoint of ours."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mds_ckpt import commit
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_train.config import ModelConfig

LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def golden_folder() -> Path:
    """The fixtures, or skip."""
    given = os.environ.get("MDS_GOLDEN_DIR")
    candidates = [Path(given)] if given else []
    candidates += [parent / "shared" / "fixtures" for parent in Path(__file__).resolve().parents]
    for folder in candidates:
        if (folder / "trajectories" / "trajectories.json").is_file():
            return folder
    pytest.skip("the golden fixtures (../shared/fixtures or MDS_GOLDEN_DIR) are not here")


def golden_losses(run: str) -> list[float]:
    """Loss of each step of one of the original's runs."""
    runs = json.loads((golden_folder() / "trajectories" / "trajectories.json").read_text())
    return [step["loss"]["lm loss"] for step in runs[run]["steps"]]


def canonical_name(name: str, *, num_layers: int) -> str:
    """Our name for a parameter of the original's pipeline module."""
    if name.startswith("tied_modules.embed."):
        return name.replace("tied_modules.embed.", "embedding.")
    number, _, rest = name.partition(".")
    layer = int(number) - 2
    if layer < 0:
        return f"embedding.{rest}"
    if layer < num_layers:
        module, _, kind = rest.rpartition(".")
        return f"decoder.layers.{layer}.{LAYER_NAMES[module]}.{kind}"
    return f"decoder.final_layernorm.{rest}" if layer == num_layers else "output_layer.weight"


def write_initial_checkpoint(root: Path, *, weights: str, model: ModelConfig) -> Path:
    """The original's initial weights as a checkpoint of ours."""
    stored = np.load(golden_folder() / "trajectories" / weights)
    arrays = {
        canonical_name(name, num_layers=model.num_layers): stored[name] for name in stored.files
    }
    return write_weights(root, arrays, model=model)


def write_weights(
    root: Path, arrays: Mapping[str, np.ndarray[Any, Any]], *, model: ModelConfig
) -> Path:
    """A checkpoint at step 0 that holds these weights and nothing else."""
    partial = commit.stage(root, 0)
    whole = {name: tuple((0, extent) for extent in array.shape) for name, array in arrays.items()}
    written = write_rank_file(
        partial, 0, [(name, "weight", whole[name], None, array) for name, array in arrays.items()]
    )
    shapes = {name: array.shape for name, array in arrays.items()}
    parameters, files = merge_rank_files(shapes, [written])
    manifest = CheckpointManifest(
        uuid="00000000-0000-0000-0000-000000000000",
        created="2026-01-01T00:00:00Z",
        producer={"name": "test", "version": "0"},
        step=0,
        counters={"iteration": 0},
        model=ModelRecord(
            family="gpt",
            config=dataclasses.asdict(model.core()),
            vocab_size=model.vocab_size,
            tied_embeddings=model.tie_embeddings,
        ),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=root)
