import pickle

import numpy as np
import pytest
import zarr
from store_material import assert_holds, random_documents, write_small

from mds_data import StoreError, StoreWriter, open_store
from mds_data.store.append import StoreAppender, append_documents
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store


@pytest.mark.parametrize("layout", ["hot", "archive"])
@pytest.mark.parametrize("first", [0, 1, 30])
def test_appended_documents_follow_the_others(tmp_path, layout, first):
    documents = random_documents(70)
    path = tmp_path / "s"
    old = write_small(path, documents[:first], layout=layout)

    append_documents(path, documents[first:50])
    new = append_documents(path, documents[50:])

    assert_holds(open_store(path), documents)
    assert (new.uuid, new.revision) == (old.uuid, 3)
    assert verify_store(path).problems == ()
    assert verify_store(path).notes == ()
    group = zarr.open_group(path, mode="r")
    np.testing.assert_array_equal(group["tokens"][:], np.concatenate(documents))


def test_an_appended_store_has_the_files_of_one_written_at_once(tmp_path):
    documents = random_documents(70)
    write_small(tmp_path / "once", documents)
    write_small(tmp_path / "grown", documents[:33])
    append_documents(tmp_path / "grown", documents[33:])

    once, grown = open_store(tmp_path / "once").manifest, open_store(tmp_path / "grown").manifest
    assert once.files == grown.files
    assert once.counts == grown.counts


def test_whole_shards_stay_the_same_files(tmp_path):
    path = tmp_path / "s"
    write_small(path, random_documents(20))
    before = (path / "tokens/c/0").stat().st_ino
    append_documents(path, random_documents(20))
    assert (path / "tokens/c/0").stat().st_ino == before


def test_sentences_and_columns_grow_too(tmp_path):
    path = tmp_path / "s"
    with StoreWriter(path, vocab_size=10, sentences=True, columns={"source": "int64"}) as writer:
        writer.add([1, 2], sentence_lengths=[1, 1], columns={"source": 5})
        writer.commit()
    with StoreAppender(path) as appender:
        appender.add([3], sentence_lengths=[1], columns={"source": 6})
        appender.commit()

    store = open_store(path)
    assert store.column("source").tolist() == [5, 6]
    assert store.sentence_length.tolist() == [1, 1, 1]
    assert store.manifest.counts.sentences == 3
    assert verify_store(path).problems == ()


def test_what_is_not_committed_leaves_no_trace(tmp_path):
    path = tmp_path / "s"
    documents = random_documents(9)
    write_small(path, documents)
    with StoreAppender(path) as appender:
        appender.add([1, 2, 3])
    assert_holds(open_store(path), documents)
    assert verify_store(path).notes == ()
    assert [item.name for item in tmp_path.iterdir()] == ["s"]


def test_appending_nothing_changes_nothing(tmp_path):
    manifest = write_small(tmp_path / "s", random_documents(3))
    assert append_documents(tmp_path / "s", []) == manifest


def test_an_open_store_stays_at_its_revision(tmp_path):
    path = tmp_path / "s"
    documents = random_documents(30)
    write_small(path, documents)
    store = open_store(path)
    assert_holds(store, documents)
    sent = pickle.dumps(store)

    append_documents(path, [[1, 2]])

    assert_holds(store, documents)
    with pytest.raises(StoreError, match="was replaced or changed"):
        pickle.loads(sent)


def test_a_merged_store_is_not_appended_to(tmp_path):
    write_small(tmp_path / "s", random_documents(3))
    merge_stores([tmp_path / "s"], tmp_path / "m")
    with pytest.raises(StoreError, match="made of segments"):
        append_documents(tmp_path / "m", [[1]])


def test_a_wrong_path_leaves_no_lock(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such store"):
        append_documents(tmp_path / "nothing", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_left_alone(tmp_path):
    path = tmp_path / "s"
    write_small(path, random_documents(3))
    for name in ("notes.r9", "tokens/c/mine.r2"):
        (path / name).write_text("mine")
    (path / "tokens/c/7.r9").write_text("left by a writer that died")
    append_documents(path, [[1]])
    assert (path / "notes.r9").exists()
    assert (path / "tokens/c/mine.r2").exists()
    assert not (path / "tokens/c/7.r9").exists()
