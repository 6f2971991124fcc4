import numpy as np
import pytest
from store_material import assert_holds, golden_datasets, random_documents, write_small

from mds_data import StoreWriter, TokenizerFile, open_store
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.repack import repack_store, split_store
from mds_data.store.split import split_bounds
from mds_data.store.verify import verify_store


@pytest.mark.parametrize(("source", "target"), [("hot", "archive"), ("archive", "hot")])
def test_repacking_keeps_documents_and_what_belongs_to_them(tmp_path, source, target):
    with StoreWriter(
        tmp_path / "s",
        vocab_size=10,
        eod_id=9,
        layout=source,
        sentences=True,
        columns={"source": "int16"},
        split="50,50,0",
        tokenizer=TokenizerFile(kind="k", content=b"{}"),
        provenance={"inputs": []},
    ) as writer:
        for number in range(6):
            ids = np.arange(number) % 10
            lengths = [number] if number else []
            writer.add(ids, sentence_lengths=lengths, columns={"source": number})
        writer.commit()

    manifest = repack_store(tmp_path / "s", tmp_path / "t", layout=target)

    old, new = open_store(tmp_path / "s"), open_store(tmp_path / "t")
    assert_holds(new, list(old))
    assert manifest.layout == target
    assert new.column("source").tolist() == old.column("source").tolist()
    assert new.sentence_length.tolist() == old.sentence_length.tolist()
    assert (new.eod_id, new.manifest.split) == (9, old.manifest.split)
    assert new.manifest.tokenizer == old.manifest.tokenizer
    assert new.manifest.provenance["transforms"][-1]["name"] == "repack"
    assert verify_store(tmp_path / "t").problems == ()


def test_repacking_joins_segments_and_closes_gaps(tmp_path):
    documents = random_documents(30)
    write_small(tmp_path / "s", documents)
    erase_documents(tmp_path / "s", [4, 5], reason="asked")
    merge_stores([tmp_path / "s", tmp_path / "s"], tmp_path / "m")

    repack_store(tmp_path / "s", tmp_path / "a", layout="hot")
    repack_store(tmp_path / "m", tmp_path / "t", layout="hot")

    left = [[] if number in (4, 5) else document for number, document in enumerate(documents)]
    store = open_store(tmp_path / "t")
    assert_holds(store, left + left)
    assert store.num_positions == store.doc_length.sum()
    assert open_store(tmp_path / "a").manifest.erasures[0].documents == (4, 5)


def test_the_archive_is_small(tmp_path):
    store = open_store(golden_datasets() / "pydoc_text_document")
    repack_store(store.path, tmp_path / "t", layout="archive")
    index = 16 * 4096 + 4  # of a shard, however little it holds
    size = (tmp_path / "t/tokens/c/0").stat().st_size - index
    assert size < 0.45 * 2 * store.num_positions


def test_splitting_follows_the_original_s_borders(tmp_path):
    documents = random_documents(41)
    write_small(tmp_path / "s", documents)

    written = split_store(tmp_path / "s", tmp_path / "parts", split="90,7,3")

    _, valid, test, end = split_bounds("90,7,3", documents=41)
    assert list(written) == ["train", "valid", "test"]
    assert_holds(open_store(tmp_path / "parts/train"), documents[:valid])
    assert_holds(open_store(tmp_path / "parts/valid"), documents[valid:test])
    assert_holds(open_store(tmp_path / "parts/test"), documents[test:end])


def test_a_part_without_documents_is_left_out(tmp_path):
    write_small(tmp_path / "s", random_documents(10), split="50,50,0")
    assert list(split_store(tmp_path / "s", tmp_path / "parts")) == ["train", "valid"]


def test_a_store_without_a_split_needs_shares(tmp_path):
    write_small(tmp_path / "s", random_documents(10))
    with pytest.raises(ValueError, match="keeps no split; give the shares"):
        split_store(tmp_path / "s", tmp_path / "parts")
