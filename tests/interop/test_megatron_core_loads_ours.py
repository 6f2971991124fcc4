"""The real Megatron-core loads what ``mds-ckpt convert --to mcore`` writes, and computes alike.

It needs megatron-core, whose dependencies conflict with ours: install it in an environment of its
own (``pip install --no-deps megatron-core==0.16.1 psutil`` beside torch and numpy) and name that
environment's Python with ``MDS_MEGATRON_CORE_PYTHON``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from real_megatron import environment

from mds_ckpt import convert, open_checkpoint

FACTS = "torch_dist:num_attention_heads=4,activation=gelu"


def logits_of(python: str, step: Path, scratch: Path, name: str) -> tuple[np.ndarray, int]:
    """The logits of the real model with the weights in ``step``, and its stored number of heads."""
    names = [step, *(scratch / file for file in ("tokens.npz", f"{name}.npz", f"{name}.meeting"))]
    run = subprocess.run(
        [python, str(Path(__file__).with_name("core_model.py")), *map(str, names)],
        cwd=scratch,
        env=environment(scratch),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    with np.load(scratch / f"{name}.npz") as found:
        return found["logits"], int(found["heads"])


@pytest.mark.timeout(600)
def test_real_megatron_core_loads_ours_as_its_own(golden: Path, tmp_path: Path) -> None:
    python = os.environ.get("MDS_MEGATRON_CORE_PYTHON")
    if python is None:
        pytest.skip("MDS_MEGATRON_CORE_PYTHON names no Python with megatron-core")
    source = golden / "mcore_torch_dist_gpt_tp2"
    convert(source / "ckpt", tmp_path / "between", to="mds", source_format=FACTS)
    convert(tmp_path / "between", tmp_path / "ours", to="mcore")
    with np.load(source / "expected.npz") as archive:
        tokens, logits = archive["tokens"], archive["logits"]
    places = open_checkpoint(tmp_path / "between").config["max_position_embeddings"]
    np.savez(tmp_path / "tokens.npz", tokens=tokens, positions=places)
    (step,) = (tmp_path / "ours").glob("iter_*")

    (own,) = (source / "ckpt").glob("iter_*")
    theirs, _ = logits_of(python, own, tmp_path, "theirs")
    ours, heads = logits_of(python, step, tmp_path, "ours")

    assert ours.tobytes() == theirs.tobytes()
    assert heads == 4  # from the stored arguments
    # Matrix products of another machine sum in another order: on the checkpoint that Megatron-core
    # wrote itself, 2.0e-6 were seen where logits reach 4.7, four units in the last place.
    np.testing.assert_allclose(ours, logits, rtol=0, atol=5e-6)
