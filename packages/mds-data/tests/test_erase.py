import numpy as np
import pytest
import zarr
from store_material import assert_holds, random_documents, write_small

from mds_data import GPTDataset, StoreWriter, open_store
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store


@pytest.fixture
def documents():
    return random_documents(40, longest=300)


def erased(documents, numbers):
    return [[] if number in numbers else document for number, document in enumerate(documents)]


@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_erased_documents_are_empty_and_others_keep_their_numbers(tmp_path, documents, layout):
    path = tmp_path / "s"
    write_small(path, documents, layout=layout)

    report = erase_documents(path, [5, 17, 17, 39], reason="request 12")

    assert_holds(open_store(path), erased(documents, {5, 17, 39}))
    manifest = open_store(path).manifest
    assert report.documents == (5, 17, 39)
    assert report.tokens == sum(len(documents[number]) for number in (5, 17, 39))
    assert manifest.erasures[0].documents == (5, 17, 39)
    assert manifest.erasures[0].reason == "request 12"
    assert manifest.counts.tokens == sum(map(len, documents)) - report.tokens
    assert verify_store(path).problems == ()
    row = zarr.open_group(path, mode="r")["tokens"][:]
    np.testing.assert_array_equal(row, open_store(path).tokens(0, len(row)))


def test_the_bytes_are_gone_from_the_disk(tmp_path, documents):
    path = tmp_path / "s"
    write_small(path, documents)
    needle = documents[7][:20].tobytes()
    held = (path / "tokens/c").glob("*")
    old = [file.open("rb") for file in held]  # the old files, by the inodes they had
    assert any(needle in file.read() for file in old)

    erase_documents(path, [7], reason="asked")

    for file in old:
        file.seek(0)
        assert needle not in file.read()
        file.close()
    assert not any(needle in file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_stores_that_share_the_files_are_named(tmp_path, documents):
    write_small(tmp_path / "s", documents)
    merge_stores([tmp_path / "s"], tmp_path / "elsewhere/m")

    report = erase_documents(tmp_path / "s", [7], reason="asked", search=[tmp_path])

    assert report.linked_stores == (str(tmp_path / "elsewhere/m/segments/0000"),)
    assert any(name.startswith("tokens/c/") for name in report.linked_files)
    assert_holds(open_store(tmp_path / "elsewhere/m"), documents)
    assert verify_store(tmp_path / "elsewhere/m").problems == ()


def test_columns_and_sentences_of_erased_documents_go_too(tmp_path):
    path = tmp_path / "s"
    with StoreWriter(path, vocab_size=10, sentences=True, columns={"url": "uint64"}) as writer:
        for number in range(4):
            writer.add([1, 2, 3], sentence_lengths=[1, 2], columns={"url": number + 50})
        writer.commit()

    erase_documents(path, [2], reason="asked")

    store = open_store(path)
    assert store.column("url").tolist() == [50, 51, 0, 53]
    assert store.doc_sentences.tolist() == [2, 2, 0, 2]
    assert store.sentence_length.tolist() == [1, 2] * 3
    assert verify_store(path).problems == ()


def test_erasing_twice_is_one_record(tmp_path, documents):
    write_small(tmp_path / "s", documents)
    erase_documents(tmp_path / "s", [3], reason="asked")
    report = erase_documents(tmp_path / "s", [3], reason="asked")
    assert report.documents == ()
    assert len(open_store(tmp_path / "s").manifest.erasures) == 1


@pytest.mark.parametrize("number", [-1, 40])
def test_a_document_that_is_not_there_is_an_error(tmp_path, documents, number):
    write_small(tmp_path / "s", documents)
    with pytest.raises(IndexError, match=f"has no document {number}; it holds 40"):
        erase_documents(tmp_path / "s", [number], reason="asked")


@pytest.mark.parametrize("order", ["fast", "megatron"])
def test_training_samples_leave_the_gap_out(tmp_path, documents, order):
    path = tmp_path / "s"
    write_small(path, documents)
    erase_documents(path, [10, 11, 30], reason="asked")

    dataset = GPTDataset(open_store(path), seq_length=10, order=order)

    left = np.concatenate(erased(documents, {10, 11, 30}))
    seen = np.concatenate([dataset.window(number)[:-1] for number in range(len(dataset))])
    counts = np.bincount(left.astype(int), minlength=1000) - np.bincount(seen, minlength=1000)
    assert counts.min() >= 0
    assert counts.sum() == len(left) - len(seen) <= 10
