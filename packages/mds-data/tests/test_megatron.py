import json
import logging

import numpy as np
import pytest
from store_material import assert_holds, golden_datasets, random_documents, write_small
from test_indexed_dataset import DOCUMENTS, write_pair

from mds_data import IndexedDatasetError, StoreError, open_store
from mds_data.store.erase import erase_documents
from mds_data.store.megatron import export_megatron, import_megatron, repair_append_eod
from mds_data.store.verify import verify_store

FAULTY = np.array([1, 2, 3, 99, 4, 5, 99, 6, 7, 8, 9, 99], "<u2").tobytes()


@pytest.mark.parametrize(
    "name", ["pydoc_text_document", "licenses_text_document", "pydocss_text_sentence"]
)
@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_a_pair_survives_the_way_in_and_out(tmp_path, name, layout):
    source = golden_datasets() / name
    manifest = import_megatron(source, tmp_path / "s", layout=layout)
    export_megatron(tmp_path / "s", tmp_path / "p")

    assert (tmp_path / "p.idx").read_bytes() == source.with_suffix(".idx").read_bytes()
    data = (tmp_path / "p.bin").read_bytes()
    assert data == source.with_suffix(".bin").read_bytes()[: len(data)]
    assert manifest.counts.tokens * 2 == len(data)
    assert verify_store(tmp_path / "s").problems == ()


def test_the_vocabulary_is_the_largest_id_unless_it_is_given(tmp_path):
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    assert import_megatron(prefix, tmp_path / "a").vocab_size == 10
    assert import_megatron(prefix, tmp_path / "b", vocab_size=70000).dtype == "int32"
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        import_megatron(prefix, tmp_path / "c", vocab_size=5)
    assert not (tmp_path / "c").exists()


def test_the_append_eod_fault_is_taken_over_with_a_warning(tmp_path, caplog):
    prefix = write_pair(tmp_path / "p", DOCUMENTS, data=FAULTY)
    with caplog.at_level(logging.WARNING):
        import_megatron(prefix, tmp_path / "s")
    assert "3 documents are read shifted; repair=True" in caplog.text
    assert [item.tolist() for item in open_store(tmp_path / "s")] == [
        [1, 2, 3],
        [99, 4],
        [5, 99, 6, 7],
    ]


def test_tokens_that_the_index_does_not_know_are_told(tmp_path, caplog):
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(data + b"\7\0")

    with caplog.at_level(logging.WARNING):
        import_megatron(prefix, tmp_path / "s")

    assert "1 tokens of 2 bytes that its index does not know" in caplog.text
    prefix.with_suffix(".bin").write_bytes(data + b"\7")
    with pytest.raises(IndexedDatasetError, match=r"\.bin file ends 1 bytes into one"):
        import_megatron(prefix, tmp_path / "t")


def test_the_append_eod_fault_is_mended(tmp_path):
    prefix = write_pair(tmp_path / "p", DOCUMENTS, data=FAULTY)
    manifest = repair_append_eod(prefix, tmp_path / "s")
    assert manifest.eod_id == 99
    assert [item.tolist() for item in open_store(tmp_path / "s")] == [
        [*document, 99] for document in DOCUMENTS
    ]


def test_mended_golden_documents_decode_to_their_text(tmp_path):
    """The ids of the first characters of each document are those of its text."""
    folder = golden_datasets()
    repair_append_eod(folder / "pydoc_text_document", tmp_path / "s")
    vocabulary = json.loads((folder / "gpt2bpe-vocab.json").read_text())
    spelling = {number: text for text, number in vocabulary.items()}
    texts = [json.loads(line)["text"] for line in (folder / "pydoc.jsonl").read_text().splitlines()]

    store = open_store(tmp_path / "s")

    assert len(store) == len(texts)
    for document, text in zip(store, texts, strict=True):
        assert document[-1] == 599
        spelt = "".join(spelling[number] for number in document[:20].tolist())
        plain = spelt.replace("Ġ", " ").replace("Ċ", "\n")
        assert not text.isascii() or text.startswith(plain)


def test_what_is_not_broken_is_not_mended(tmp_path):
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    with pytest.raises(IndexedDatasetError, match="does not have the --append-eod fault"):
        repair_append_eod(prefix, tmp_path / "s")


def test_erased_documents_are_exported_as_empty_ones(tmp_path):
    documents = random_documents(20)
    write_small(tmp_path / "s", documents)
    erase_documents(tmp_path / "s", [2, 3], reason="asked")
    export_megatron(tmp_path / "s", tmp_path / "p")
    left = [[] if number in (2, 3) else document for number, document in enumerate(documents)]
    assert_holds(open_store(tmp_path / "p"), left)


def test_an_export_does_not_overwrite(tmp_path):
    write_small(tmp_path / "s", [[1]])
    (tmp_path / "p.idx").write_text("mine")
    with pytest.raises(StoreError, match=r"p\.idx: exists"):
        export_megatron(tmp_path / "s", tmp_path / "p")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.idx", "s"]
