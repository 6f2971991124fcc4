import hashlib
import json
import tracemalloc

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from store_material import (
    VOCAB_SIZE,
    assert_holds,
    case_folder,
    random_documents,
    write_small,
)

from mds_data import StoreError, StoreWriter, TokenizerFile, open_store, write_store
from mds_data.store.megatron import export_megatron
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store


@pytest.mark.parametrize("layout", ["hot", "archive"])
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 65536, 65537])
def test_documents_come_back(tmp_path, layout, vocab_size):
    documents = [*random_documents(50), [], [0, vocab_size - 1]]

    manifest = write_store(tmp_path / "s", documents, vocab_size=vocab_size, layout=layout)

    store = open_store(tmp_path / "s")
    assert_holds(store, documents)
    assert store.dtype == ("<u2" if vocab_size <= 65536 else "<i4")
    assert store.manifest == manifest
    assert manifest.counts.documents == 52
    assert manifest.counts.tokens == sum(len(document) for document in documents)


def test_a_store_is_not_written_inside_another(tmp_path):
    write_small(tmp_path / "s", random_documents(3))

    for target in (tmp_path / "s/tokens", tmp_path / "s/new", tmp_path / "s/deep/er"):
        with pytest.raises(StoreError, match=r"exists; choose|lies inside the store .*/s; name"):
            write_small(target, random_documents(3))
    with pytest.raises(StoreError, match=r"lies inside the store .*/s; name a folder beside it"):
        merge_stores([tmp_path / "s"], tmp_path / "s/merged")
    with pytest.raises(StoreError, match=r"lies inside the store .*/s; name a folder beside it"):
        export_megatron(tmp_path / "s", tmp_path / "s/pair")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]
    assert not verify_store(tmp_path / "s").notes


@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_zarr_reads_what_was_written(tmp_path, layout):
    documents = random_documents(200)
    write_small(tmp_path / "s", documents, layout=layout, columns={})

    group = zarr.open_group(tmp_path / "s", mode="r")

    lengths = [len(document) for document in documents]
    np.testing.assert_array_equal(group["tokens"][:], np.concatenate(documents))
    np.testing.assert_array_equal(group["doc_length"][:], lengths)
    np.testing.assert_array_equal(group["doc_start"][:], np.cumsum([0, *lengths[:-1]]))


def test_shards_are_those_that_zarr_would_write(tmp_path):
    documents = random_documents(100)
    write_small(tmp_path / "s", documents)
    ids = np.concatenate(documents)

    array = zarr.create_array(
        tmp_path / "z",
        shape=ids.shape,
        dtype=ids.dtype,
        chunks=(64,),
        shards=(256,),
        compressors=[zarr.codecs.Crc32cCodec()],
    )
    array[:] = ids

    for number in range(-(-len(ids) // 256)):
        ours = (tmp_path / f"s/tokens/c/{number}").read_bytes()
        assert ours == (tmp_path / f"z/c/{number}").read_bytes()


@given(
    lengths=st.lists(st.integers(0, 50), max_size=20),
    chunk=st.integers(1, 40),
    chunks=st.integers(1, 5),
)
@settings(max_examples=30, deadline=None)
def test_chunk_and_shard_sizes_do_not_show(tmp_path_factory, lengths, chunk, chunks):
    path = tmp_path_factory.mktemp("w") / "s"
    documents = [np.arange(length) + number for number, length in enumerate(lengths)]

    write_small(path, documents, chunk_tokens=chunk, chunks_per_shard=chunks)

    with open_store(path) as store:
        assert_holds(store, documents)


def test_many_documents_at_once_are_the_same_as_one_by_one(tmp_path):
    documents = random_documents(60)
    write_small(tmp_path / "one", documents)
    with StoreWriter(
        tmp_path / "many", vocab_size=VOCAB_SIZE, chunk_tokens=64, chunks_per_shard=4
    ) as writer:
        for start in range(0, 60, 7):
            part = documents[start : start + 7]
            writer.add_many(np.concatenate(part), lengths=[len(item) for item in part])
        assert writer.num_documents == 60
        writer.commit()

    names = [path for path in (tmp_path / "one").rglob("*") if path.is_file()]
    for path in names:
        if path.name != "manifest.json":
            twin = tmp_path / "many" / path.relative_to(tmp_path / "one")
            assert path.read_bytes() == twin.read_bytes()


def test_sentences_columns_and_tokenizer_are_kept(tmp_path):
    with StoreWriter(
        tmp_path / "s",
        vocab_size=10,
        eod_id=9,
        sentences=True,
        columns={"language": "uint8", "score": "float32"},
        tokenizer=TokenizerFile(kind="HFTokenizer", content=b"{}", name="mine"),
        split="95,5,0",
    ) as writer:
        writer.add([1, 2, 9], sentence_lengths=[1, 2], columns={"language": 7, "score": 0.5})
        writer.add([3], sentence_lengths=[1], columns={"language": 8, "score": 0.25})
        writer.commit(provenance={"inputs": [{"path": "a.jsonl"}]})

    store = open_store(tmp_path / "s")
    assert store.columns == ("language", "score")
    assert store.column("score").tolist() == [0.5, 0.25]
    assert store.sentence_length.tolist() == [1, 2, 1]
    assert store.doc_sentences.tolist() == [2, 1]
    assert store.manifest.counts.sentences == 3
    assert store.manifest.tokenizer.file == "tokenizer.json"
    assert (tmp_path / "s/tokenizer.json").read_bytes() == b"{}"
    assert store.manifest.split == {"train": (0, 0.95), "valid": (0.95, 1), "test": (1, 1)}
    assert store.manifest.provenance == {"inputs": [{"path": "a.jsonl"}]}


@pytest.mark.parametrize("token", [-1, 1000, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(tmp_path, token):
    with (
        pytest.raises(ValueError, match=f"token {token}, outside the vocabulary of 1000"),
        StoreWriter(tmp_path / "s", vocab_size=1000) as writer,
    ):
        writer.add([1, token, 2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("document", [[0.5], [[1, 2]], ["a"], "text", 7])
def test_what_is_no_row_of_ids_is_refused(tmp_path, document):
    with (
        pytest.raises(ValueError, match="row of whole numbers"),
        StoreWriter(tmp_path / "s", vocab_size=1000) as writer,
    ):
        writer.add(document)


def test_a_writer_that_does_not_commit_leaves_nothing(tmp_path):
    with StoreWriter(tmp_path / "s", vocab_size=10) as writer:
        writer.add([1, 2])
    assert list(tmp_path.iterdir()) == []


def test_an_existing_name_is_refused(tmp_path):
    (tmp_path / "s").mkdir()
    with pytest.raises(StoreError, match="s: exists; choose another name"):
        write_store(tmp_path / "s", [[1]], vocab_size=10)


@pytest.mark.parametrize(
    "options",
    [{"vocab_size": 0}, {"vocab_size": 10, "eod_id": 10}, {"vocab_size": 10, "layout": "warm"}],
)
def test_impossible_settings_are_refused(tmp_path, options):
    with pytest.raises(ValueError, match=r"vocab_size|eod_id|layout"):
        write_store(tmp_path / "s", [], **options)


def test_a_store_without_documents_opens(tmp_path):
    write_store(tmp_path / "s", [], vocab_size=10)

    store = open_store(tmp_path / "s")

    assert len(store) == 0
    assert list(store) == []
    assert store.tokens(0, 0).tolist() == []


def test_a_reproducible_build_gives_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a", "b"):
        write_small(tmp_path / name, random_documents(9))

    first = (tmp_path / "a/manifest.json").read_bytes()

    assert first == (tmp_path / "b/manifest.json").read_bytes()
    assert json.loads(first)["created"] == "2023-11-14T22:13:20Z"


def test_memory_does_not_grow_with_the_store(tmp_path):
    document = np.arange(50_000) % VOCAB_SIZE
    write_store(tmp_path / "warm", [document], vocab_size=VOCAB_SIZE)

    tracemalloc.start()
    write_store(tmp_path / "s", (document for _ in range(200)), vocab_size=VOCAB_SIZE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 4 * 2**20  # the store holds 20 MB


@pytest.mark.parametrize("chunk", [7, 999, 1000, 10**6])
def test_documents_over_the_edges_of_chunks_and_shards_stay_whole(tmp_path, chunk):
    """The inputs of a bug report: writers that shared a shard lost a third of the data."""
    folder = case_folder("B12")
    facts = json.loads((folder / "expected.json").read_text())
    lines = (folder / "in.jsonl").read_text().splitlines()
    documents = [[*json.loads(line)["text"].encode(), 256] for line in lines]

    write_small(tmp_path / "s", documents, chunk_tokens=chunk, chunks_per_shard=64)

    store = open_store(tmp_path / "s")
    row = store.tokens(0, store.num_positions)
    digest = hashlib.sha256(row.astype("<u4").tobytes()).hexdigest()
    assert len(store) == facts["documents"]
    assert len(row) == facts["total_tokens"]
    assert row[:20].tolist() == facts["first_20_tokens"]
    assert digest == facts["sha256 of the token stream as little-endian uint32"]
