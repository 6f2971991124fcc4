"""A checkpoint that the real megatron-core wrote, converted for transformers, gives its logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mds_ckpt import convert

torch = pytest.importorskip("torch", reason="transformers needs torch")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def test_megatron_core_logits_are_transformers_logits(golden: Path, tmp_path: Path) -> None:
    source = golden / "mcore_torch_dist_gpt_tp2"
    facts = "torch_dist:num_attention_heads=4,activation=gelu"
    convert(source / "ckpt", tmp_path / "hf", to="hf", source_format=facts)

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.config.activation_function == "gelu"
    with np.load(source / "expected.npz") as expected, torch.no_grad():
        logits = model.eval()(torch.from_numpy(expected["tokens"])).logits.numpy()
        assert np.abs(expected["logits"]).max() > 0.5
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)
