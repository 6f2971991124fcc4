"""Parameters that are not trained, of the real DeepSpeed's ZeRO stage 3, are read with all others.

Stage 3 shares them out too, in the model files, where the trained ones have no weights. Three ranks
divide few of them evenly, so their last shares are padded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_megatron import environment

from mds_ckpt import convert, open_checkpoint

pytest.importorskip("torch", reason="DeepSpeed needs torch")
pytest.importorskip("deepspeed", reason="the real DeepSpeed is not installed")
if os.environ.get("MDS_INTEROP") != "full":
    pytest.skip("`nox -s interop` runs it", allow_module_level=True)

WORDS = 50
FROZEN = (
    "language_model.embedding",
    "language_model.encoder.layers.0",
    "language_model.encoder.layers.1.mlp",
)
RENAMED = {
    "language_model.": "",
    "encoder.": "decoder.",
    "query_key_value": "linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "dense_h_to_4h": "linear_fc1",
    "dense_4h_to_h": "linear_fc2",
}


def canonical(name: str) -> str:
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_all_parameters_are_those_that_deepspeed_gathers(tmp_path: Path, dtype: str) -> None:
    job = {"stage": 3, "dtype": dtype, "experts": 0, "steps": 2, "frozen": FROZEN}
    folders = {name: str(tmp_path / name) for name in ("save", "then")}
    values = {"values": str(tmp_path / "values.npz")}
    (tmp_path / "jobs.json").write_text(json.dumps([job | folders | values]))
    script = str(Path(__file__).with_name("plain_engine.py"))

    subprocess.run(
        [sys.executable, script, "3", str(tmp_path / "jobs.json"), str(tmp_path / "meeting")],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        timeout=280,
        check=True,
    )
    convert(tmp_path / "save", tmp_path / "hf", to="hf")
    convert(tmp_path / "save", tmp_path / "mds", to="mds")

    with np.load(tmp_path / "values.npz") as gathered:
        wanted = {canonical(name): gathered[name] for name in gathered}
        frozen = {canonical(name) for name in gathered if name.startswith(FROZEN)}
    read = open_checkpoint(tmp_path / "save")
    assert len(frozen) == 18
    assert read.tensors.keys() == wanted.keys()
    assert read.states["exp_avg"].keys() == wanted.keys() - frozen
    for folder in ("save", "hf", "mds"):
        tensors = open_checkpoint(tmp_path / folder).tensors
        for name, value in wanted.items():
            found = tensors[name].numpy().astype("f4")
            np.testing.assert_array_equal(found, value[: len(found)], err_msg=f"{folder} {name}")
            assert len(found) == (WORDS if "word_embeddings" in name else len(value))
