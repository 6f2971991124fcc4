"""Where the golden checkpoints are, and what their tensors are by canonical name.

The mapping here is written apart from the package's, in plain numpy, so that the two can disagree.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _shared(variable: str, name: str) -> Path:
    if variable in os.environ:
        return Path(os.environ[variable])
    for parent in Path(__file__).resolve().parents:
        if (parent / "shared" / name).is_dir():
            return parent / "shared" / name
    pytest.skip(f"no golden data: set {variable}, or put it at ../shared/{name}")


def fixture(name: str) -> Path:
    return _shared("MDS_GOLDEN_DIR", "fixtures") / name


def case(name: str) -> Path:
    return _shared("MDS_CASES_DIR", "cases") / name


RENAMED = {
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}


def canonical(name: str, num_layers: int) -> str:
    name = name.removeprefix("tied_modules.embed.").removeprefix("language_model.")
    name = name.removeprefix("embedding.").removeprefix("1.")
    if name.startswith(("word_embeddings", "position_embeddings")):
        return f"embedding.{name}"
    if "lm_head" in name or "output_layer" in name:
        return "output_layer.weight"
    final = re.fullmatch(r"(?:encoder\.final_layernorm|\d+)\.(weight|bias)", name)
    if final:
        return f"decoder.final_layernorm.{final[1]}"
    layer = re.fullmatch(r"encoder\.layers\.(\d+)\.(.+)", name)
    number, rest = layer.groups() if layer else re.fullmatch(r"(\d+)\.(.+)", name).groups()
    module, part = rest.rsplit(".", 1)
    number = int(number) if layer else int(number) - 2
    assert number < num_layers
    return f"decoder.layers.{number}.{RENAMED.get(module, module)}.{part}"


def whole(name: str, array: np.ndarray[Any, Any], *, tp: int, thirds: bool, heads: int) -> Any:
    """One merged tensor of expected.npz in the canonical order, with the true vocabulary of 600."""
    if "word_embeddings" in name or name == "output_layer.weight":
        return array[:600]
    rest = array.shape[1:]
    if thirds and "linear_qkv" in name:
        ranks = array.reshape(tp, 3, heads // tp, -1, *rest)
        return np.moveaxis(ranks, 1, 2).reshape(array.shape)
    return array


def expected(name: str, prefix: str, *, thirds: bool = False, heads: int = 4) -> dict[str, Any]:
    """The tensors of one kind (``lp`` or ``fp32``) in a set's expected.npz."""
    about = json.loads((fixture(name) / "expected.json").read_text())
    tensors = {}
    with np.load(fixture(name) / "expected.npz") as archive:
        for key in archive.files:
            if key.startswith(f"{prefix}/"):
                new = canonical(key.removeprefix(f"{prefix}/"), 4)
                tp = about["tp"]
                tensors[new] = whole(new, archive[key], tp=tp, thirds=thirds, heads=heads)
    return tensors
