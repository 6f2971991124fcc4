"""Checkpoints of the real Megatron-core with experts, and of its BERT: read, and loaded by it.

It needs megatron-core, whose dependencies conflict with ours; see
``test_megatron_core_loads_ours``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_megatron import environment

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.read_options import ReadOptions

GPT = {
    "num_attention_heads": 4,
    "activation": "swiglu",
    "position_embedding": "rope",
    "rope_theta": 10000.0,
    "max_position_embeddings": 12,
    "moe_topk": 2,
}
BERT = {"num_attention_heads": 4, "activation": "gelu"}
EXPERTS, RANKS = 4, 2


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("MDS_MEGATRON_CORE_PYTHON")
    if found is None:
        pytest.skip("MDS_MEGATRON_CORE_PYTHON names no Python with megatron-core")
    return found


def run(python: str, kind: str, folder: Path, scratch: Path) -> list[dict[str, Any]]:
    """What each rank holds, after saving into ``folder`` or loading from it."""
    out = scratch / f"{kind}.out"
    script = str(Path(__file__).with_name("core_kinds.py"))
    done = subprocess.run(
        [python, script, kind, str(folder), str(out), str(scratch / f"{kind}.meeting")],
        cwd=scratch,
        env=environment(scratch),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [dict(np.load(f"{out}.{rank}.npz")) for rank in range(RANKS)]


def assert_experts(found: Any, ranks: list[dict[str, Any]]) -> int:
    """Each expert is that of the rank that holds it; returns how many were compared."""
    count = 0
    for rank, state in enumerate(ranks):
        for name, array in state.items():
            if ".local_experts." not in name:
                continue
            before, _, rest = name.partition(".local_experts.")
            local, _, part = rest.partition(".")
            number = int(local) + rank * EXPERTS // RANKS
            tensor = found.tensor(f"{before}.local_experts.{number}.{part}").numpy()
            np.testing.assert_array_equal(tensor, array, err_msg=name)
            count += 1
    return count


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["experts", "some", "singles"])
def test_experts_of_the_real_megatron_core_are_read(python: str, tmp_path: Path, kind: str) -> None:
    ranks = run(python, kind, tmp_path / "iter_0000010", tmp_path)

    found = open_checkpoint(tmp_path / "iter_0000010", options=ReadOptions(model=GPT))

    layers = 1 if kind == "some" else 2
    assert assert_experts(found, ranks) == layers * EXPERTS * 2
    for name, array in ranks[0].items():
        if ".local_experts." not in name and name not in ("tokens", "logits"):
            np.testing.assert_array_equal(found.tensor(name).numpy(), array, err_msg=name)
    if kind == "some":
        assert found.config["moe_shared_hidden_size"] == 8


@pytest.mark.timeout(600)
def test_a_mixtral_of_megatron_core_computes_the_same_in_transformers_and_from_ours(
    python: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ranks = run(python, "experts", tmp_path / "iter_0000010", tmp_path)
    facts = "torch_dist:" + ",".join(f"{name}={value}" for name, value in GPT.items())
    convert(tmp_path / "iter_0000010", tmp_path / "hf", to="hf", source_format=facts)
    net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        logits = net(torch.from_numpy(ranks[0]["tokens"])).logits.numpy()
    np.testing.assert_allclose(logits, ranks[0]["logits"], rtol=0, atol=1e-5)

    convert(tmp_path / "hf", tmp_path / "ours", to="mcore")
    (step,) = (tmp_path / "ours").glob("iter_*")
    again = run(python, "load", step, tmp_path)

    assert again[0]["logits"].tobytes() == ranks[0]["logits"].tobytes()


@pytest.mark.timeout(600)
def test_a_bert_of_the_real_megatron_core_is_read(python: str, tmp_path: Path) -> None:
    ranks = run(python, "bert", tmp_path / "iter_0000010", tmp_path)

    found = open_checkpoint(tmp_path / "iter_0000010", options=ReadOptions(model=BERT))

    assert found.model.family == "bert"
    assert found.config["num_token_types"] == 2
    for name, array in ranks[0].items():
        if name in ("tokens", "logits") or name.endswith("position_ids"):
            continue
        whole = found.tensor(name).numpy()
        dims = [d for d, n in enumerate(array.shape) if n != whole.shape[d]]
        parts = [rank[name] for rank in ranks]
        if "linear_qkv" in name or dims:
            joined = np.concatenate(parts, axis=dims[0] if dims else 0)
            np.testing.assert_array_equal(whole, joined, err_msg=name)
        else:
            np.testing.assert_array_equal(whole, array, err_msg=name)
