"""The examples that feed another trainer run as the page has them, and give the store's samples."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mds_data import GPTDataset, open_store, write_store

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "feed-another-trainer.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GPTDataset:
    random = np.random.default_rng(0)
    documents = [np.append(random.integers(1, 900, length), 0) for length in range(100, 400)]
    write_store(tmp_path / "store", documents, vocab_size=900, eod_id=0, split="95,5,0")
    monkeypatch.chdir(tmp_path)
    return GPTDataset(open_store("store"), seq_length=128, split="train", seed=1234)


def run(block: str) -> dict[str, Any]:
    Path("example.py").write_text(block)
    return runpy.run_path("example.py")


@pytest.mark.timeout(300)
def test_a_plain_torch_loader(dataset: GPTDataset) -> None:
    pytest.importorskip("torch", reason="the example loads torch tensors")
    names = run(BLOCKS[0])
    expected = np.stack([dataset[number]["tokens"] for number in range(32, 40)])
    np.testing.assert_array_equal(names["tokens"].numpy(), expected)
    assert names["state"]["consumed_samples"] == 40


@pytest.mark.timeout(300)
def test_a_hugging_face_iterable_dataset(dataset: GPTDataset) -> None:
    pytest.importorskip("datasets", reason="the example makes its IterableDataset")
    stream = run(BLOCKS[1])["stream"]
    for number, sample in zip(range(7, 20), stream.skip(7), strict=False):
        np.testing.assert_array_equal(sample["input_ids"], dataset[number]["tokens"])
        np.testing.assert_array_equal(sample["labels"], dataset[number]["labels"])
    assert sum(1 for _ in stream) == 100


def test_several_documents_in_one_sample(dataset: GPTDataset) -> None:
    pytest.importorskip("torch", reason="the example loads torch tensors")
    names = run(BLOCKS[2])
    ends = np.flatnonzero(names["batch"]["tokens"].flatten().numpy() == 0) + 1
    assert set(ends.tolist()) <= set(names["bounds"].tolist())


def test_each_feeding_example_has_ten_lines() -> None:
    for block in BLOCKS[:2]:
        assert len([line for line in block.splitlines() if line.strip()]) <= 10
