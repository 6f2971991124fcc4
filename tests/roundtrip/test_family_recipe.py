"""The page on adding a family works as it stands: transformers loads what its code exports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import test_hf_export as export

from mds_ckpt import families
from mds_ckpt.families import rule
from mds_ckpt.manifest import ModelRecord

PAGE = Path(__file__).parents[2] / "docs/howto/add-a-family.md"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's model, with its family among ours."""
    code: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.M):
        exec(compile(block, str(PAGE), "exec"), code)  # noqa: S102 (the page is ours)
    assert isinstance(code["STARCODER2"], rule.Family)
    monkeypatch.setattr(families, "ALL", (*families.ALL, code["STARCODER2"]))
    monkeypatch.setitem(export.MODELS, "starcoder2", code["MODEL"])
    members: dict[str, Any] = code["MODEL"]
    return members


@pytest.mark.usefixtures("model")
def test_the_family_of_the_page_goes_to_transformers_and_back(tmp_path: Path) -> None:
    export.test_transformers_loads_every_weight_bit_for_bit("starcoder2", tmp_path / "weights")
    export.test_logits_of_transformers_equal_those_of_mds_core("starcoder2", tmp_path / "logits")
    export.test_a_model_of_transformers_goes_through_mds_and_back(
        "Starcoder2Config", {"num_key_value_heads": 2}, tmp_path / "back"
    )


def test_the_family_of_the_page_names_what_it_lacks(model: dict[str, Any]) -> None:
    config = model | {"add_bias": False}
    record = ModelRecord(
        family="gpt", config=config, vocab_size=model["vocab_size"], tied_embeddings=True
    )
    with pytest.raises(ValueError, match="starcoder2 needs biases"):
        families.choose(record)
