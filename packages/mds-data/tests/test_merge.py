import json
import os
from itertools import chain, pairwise

import numpy as np
import pytest
from store_material import assert_holds, case_folder, random_documents, write_small

from mds_data import DamagedError, GPTDataset, StoreError, open_store
from mds_data.cli import main
from mds_data.store.megatron import import_megatron
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store


@pytest.fixture
def parts(tmp_path):
    documents = [random_documents(count, seed=count) for count in (12, 1, 30)]
    for number, part in enumerate(documents):
        write_small(tmp_path / str(number), part)
    return [tmp_path / str(number) for number in range(3)], [*chain.from_iterable(documents)]


def test_a_merged_store_is_its_sources_in_order(tmp_path, parts):
    paths, documents = parts

    manifest = merge_stores(paths, tmp_path / "m", split="90,10,0")

    store = open_store(tmp_path / "m")
    row = np.concatenate(documents)
    assert_holds(store, documents)
    for start in range(0, len(row), 97):
        np.testing.assert_array_equal(store.tokens(start, len(row) - 5), row[start:-5])
    assert manifest.requires == ("segments/1",)
    assert manifest.split["train"] == (0.0, 0.9)
    assert verify_store(tmp_path / "m").problems == ()


def test_training_on_it_is_training_on_one_store(tmp_path, parts):
    paths, documents = parts
    merge_stores(paths, tmp_path / "m")
    write_small(tmp_path / "one", documents)
    for order in ("fast", "megatron"):
        merged, whole = (
            GPTDataset(open_store(tmp_path / name), seq_length=13, order=order, num_samples=900)
            for name in ("m", "one")
        )
        for number in range(0, len(whole), 7):
            np.testing.assert_array_equal(merged.window(number), whole.window(number))


@pytest.mark.skipif(os.name == "nt", reason="no link counts here")
def test_nothing_is_copied_where_links_are_possible(tmp_path, parts):
    paths, _ = parts
    merge_stores(paths, tmp_path / "m")
    for number, path in enumerate(paths):
        link = tmp_path / f"m/segments/{number:04d}/tokens/c/0"
        assert (path / "tokens/c/0").stat().st_ino == link.stat().st_ino


def test_a_file_system_without_links_gets_copies(tmp_path, parts, monkeypatch):
    def refuse(source, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    paths, documents = parts
    merge_stores(paths, tmp_path / "m")
    assert_holds(open_store(tmp_path / "m"), documents)


def test_merged_stores_may_be_merged_again(tmp_path, parts):
    paths, documents = parts
    merge_stores(paths, tmp_path / "m1")
    merge_stores([tmp_path / "m1", paths[0]], tmp_path / "m2")

    assert_holds(open_store(tmp_path / "m2"), documents + documents[:12])
    assert verify_store(tmp_path / "m2").problems == ()


def test_segments_may_lie_four_deep_and_no_deeper(tmp_path, parts):
    source = parts[0][0]
    for level in range(4):
        merge_stores([source], tmp_path / f"m{level}")
        source = tmp_path / f"m{level}"
    assert len(open_store(source)) == 12
    with pytest.raises(StoreError, match="more than 4 deep"):
        merge_stores([source], tmp_path / "m4")
    assert not (tmp_path / "m4").exists()


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"vocab_size": 1001}, "vocab_size"),
        ({"eod_id": 0}, "eod_id"),
        ({"vocab_size": 70000}, "token type"),
    ],
)
def test_sources_that_do_not_go_together_are_refused(tmp_path, parts, options, fact):
    write_small(tmp_path / "other", [[1, 2]], **options)
    with pytest.raises(StoreError, match=f"different {fact} can't be merged: .*0 has .*other has"):
        merge_stores([parts[0][0], tmp_path / "other"], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_segment_that_was_exchanged_is_noticed(tmp_path, parts):
    paths, _ = parts
    merge_stores(paths, tmp_path / "m")
    segments = tmp_path / "m/segments"
    (segments / "0000").rename(segments / "x")
    (segments / "0001").rename(segments / "0000")
    (segments / "x").rename(segments / "0001")

    with pytest.raises(DamagedError, match="0000: is not the segment that was merged"):
        open_store(tmp_path / "m")
    assert len(verify_store(tmp_path / "m").problems) == 2


def test_a_missing_segment_is_noticed(tmp_path, parts):
    paths, _ = parts
    merge_stores(paths, tmp_path / "m")
    (tmp_path / "m/segments/0001").rename(tmp_path / "away")
    with pytest.raises(DamagedError, match="0001: the segment is missing"):
        open_store(tmp_path / "m")


def test_a_linked_segment_is_refused(tmp_path, parts):
    paths, _ = parts
    merge_stores(paths, tmp_path / "m")
    (tmp_path / "m/segments/0001").rename(tmp_path / "away")
    (tmp_path / "m/segments/0001").symlink_to(tmp_path / "away")
    with pytest.raises(DamagedError, match="is a link"):
        open_store(tmp_path / "m")


def test_pairs_of_the_original_are_joined_with_their_documents(tmp_path):
    folder = case_folder("B08")
    expected = json.loads((folder / "expected.json").read_text())["one + two"]

    merge_stores([folder / "in/one", folder / "in/two"], tmp_path / "m")

    store = open_store(tmp_path / "m")
    ends = np.cumsum([0, *store.sentence_length])
    assert [store.tokens(a, b).tolist() for a, b in pairwise(ends)] == expected["sequences"]
    assert store.sentence_length.tolist() == expected["lengths"]
    assert ends[:-1].tolist() == expected["token_offsets"]
    assert np.cumsum([0, *store.doc_sentences]).tolist() == expected["document_starts"]
    assert len(store) == expected["documents"]
    with pytest.raises(StoreError, match=r"one has uint16.*three_int32 has int32"):
        merge_stores([folder / "in/one", folder / "in/three_int32"], tmp_path / "x")


@pytest.mark.parametrize("rewrite", [False, True])
def test_imported_pairs_are_joined_although_each_was_seen_to_need_another_vocabulary(
    tmp_path, rewrite
):
    folder = case_folder("B08")
    expected = json.loads((folder / "expected.json").read_text())["two + one"]
    for name in ("one", "two"):
        import_megatron(folder / "in" / name, tmp_path / name)

    arguments = ["merge", str(tmp_path / "two"), str(tmp_path / "one")]
    wish = ["--rewrite"] if rewrite else []
    assert main([*arguments, *wish, "--output", str(tmp_path / "m")]) == 0

    store = open_store(tmp_path / "m")
    assert store.vocab_size == 11
    assert store.tokens(0, len(expected["stream"])).tolist() == expected["stream"]
    assert np.cumsum([0, *store.doc_sentences]).tolist() == expected["document_starts"]
    assert main(["verify", str(tmp_path / "m")]) == 0
