import json
import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from store_material import assert_holds, random_documents, write_small

from mds_data import DamagedError, DataError, ManifestError, StoreError, StoreWriter, open_store
from mds_data.store.append import append_documents
from mds_data.store.folder import read_manifest
from mds_data.store.schema import manifest_to_json
from mds_data.store.token_store import StorePart


@pytest.fixture
def documents():
    return random_documents(30)


@pytest.fixture
def path(tmp_path, documents):
    write_small(tmp_path / "s", documents)
    return tmp_path / "s"


def test_documents_are_reached_as_in_a_list(path, documents):
    store = open_store(path)
    assert len(store) == 30
    np.testing.assert_array_equal(store[-1], documents[-1])
    assert [len(item) for item in store[5:20:3]] == [len(item) for item in documents[5:20:3]]
    assert_holds(list(store), documents)
    for number in (30, -31):
        with pytest.raises(IndexError, match=f"document {number} of 30"):
            store[number]


def test_a_store_says_what_it_is(path, documents):
    with open_store(path) as store:
        assert store.vocab_size == 1000
        assert store.eod_id is None
        assert store.num_positions == sum(map(len, documents))
        assert f"30 documents, {store.num_positions} tokens" in repr(store)
        assert store.columns == ()
        with pytest.raises(KeyError, match="has no column 'language'"):
            store.column("language")
        with pytest.raises(StoreError, match="keeps no sentences"):
            _ = store.sentence_length


def test_many_shards_open_with_one_scan(tmp_path, monkeypatch):
    write_small(tmp_path / "s", [np.arange(900)], chunk_tokens=1, chunks_per_shard=1)
    scans = []
    scandir = os.scandir

    def counted(path):
        scans.append(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    monkeypatch.setattr(
        "mds_data.store.reader._map", lambda handle: pytest.fail("nothing is mapped yet")
    )
    open_store(tmp_path / "s")
    assert len(scans) == 7  # the store's folder, and two of each of the three arrays


def test_files_that_wait_for_their_names_are_read(path, documents):
    """A writer that died after its commit, before its renames."""
    append_documents(path, [[1, 2, 3]])
    for name in ("tokens/c/0", "doc_length/c/0", "tokens/zarr.json"):
        (path / name).rename(path / f"{name}.r2")
        (path / name).write_bytes(b"the old content")
    assert_holds(open_store(path), [*documents, [1, 2, 3]])


def test_files_of_a_revision_that_never_came_are_passed_over(path, documents):
    (path / "tokens/c/0.r2").write_bytes(b"left over")
    assert_holds(open_store(path), documents)


def test_a_store_can_be_opened_while_it_grows(path, documents):
    failures = []
    done = threading.Event()

    def read():
        while not done.is_set():
            try:
                store = open_store(path)
                assert len(store) >= 30
                store.tokens(0, 5)
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                failures.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        append_documents(path, [[number] * 40])
    done.set()
    reader.join()
    assert failures == []
    assert len(open_store(path)) == 50


def test_a_folder_that_is_no_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"holds no manifest\.json"):
        open_store(tmp_path)
    with pytest.raises(FileNotFoundError, match="nothing: there is no such store"):
        open_store(tmp_path / "nothing")


def rewritten(path, **changes):
    manifest = read_manifest(path)[0]
    (path / "manifest.json").write_bytes(manifest_to_json(replace(manifest, **changes)))


def test_a_shard_that_the_manifest_does_not_list_is_missed(path):
    manifest = read_manifest(path)[0]
    files = {name: record for name, record in manifest.files.items() if name != "tokens/c/1"}
    rewritten(path, files=files)
    with pytest.raises(DamagedError, match="tokens/c/1: the array needs this shard"):
        open_store(path)


def forge_metadata(path, name, **members):
    file = path / name / "zarr.json"
    metadata = json.loads(file.read_text()) | members
    file.write_text(json.dumps(metadata))
    manifest = read_manifest(path)[0]
    files = dict(manifest.files)
    files[f"{name}/zarr.json"] = replace(files[f"{name}/zarr.json"], size=file.stat().st_size)
    rewritten(path, files=files)


@pytest.mark.parametrize("length", [2**60, 10**6])
@pytest.mark.timeout(10)
def test_a_shape_that_lies_costs_no_memory(path, length):
    forge_metadata(path, "tokens", shape=[length])
    with pytest.raises(DamagedError, match="the array needs this shard"):
        open_store(path)


def test_tokens_of_another_type_are_refused(path):
    forge_metadata(path, "tokens", data_type="int16")
    with pytest.raises(DamagedError, match="the tokens are int16, and the manifest says uint16"):
        open_store(path)


def test_arrays_of_another_length_are_refused(path):
    rewritten(path, counts=replace(read_manifest(path)[0].counts, documents=31))
    with pytest.raises(DamagedError, match="doc_start: holds 30 entries for 31 documents"):
        _ = open_store(path).doc_start


def test_hostile_metadata_is_refused_in_one_sentence(path):
    for content in (b"[" * 10**5, b"\xff", b"{}", b'{"a": 1, "a": 1}', b" " * 2**21):
        (path / "tokens/zarr.json").write_bytes(content)
        manifest = read_manifest(path)[0]
        files = dict(manifest.files)
        record = files["tokens/zarr.json"]
        files["tokens/zarr.json"] = replace(record, size=len(content))
        rewritten(path, files=files)
        with pytest.raises(ManifestError, match=r"tokens/zarr\.json: ") as caught:
            open_store(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["hot", "archive"])
def test_damage_anywhere_is_an_error_or_harmless(tmp_path, documents, layout):
    """What is read is right, or an error of ours says why it can't be."""
    path = tmp_path / "t"
    write_small(path, documents, layout=layout)
    random = np.random.default_rng(3)
    files = sorted(item for item in path.rglob("*") if item.is_file())
    noticed = []
    for _ in range(150):
        file = files[random.integers(len(files))]
        data = file.read_bytes()
        broken = bytearray(data)
        for position in random.integers(0, len(data), random.integers(1, 4)):
            broken[position] ^= 1 << int(random.integers(8))
        file.write_bytes(broken)
        try:
            assert_holds(open_store(path), documents)
        except DataError as error:
            noticed.append(str(error))
        file.write_bytes(data)
    assert len(noticed) > 100
    assert not any("\n" in message for message in noticed)
    assert_holds(open_store(path), documents)


def test_a_part_shows_its_arrays(path):
    (part,) = open_store(path).parts
    assert isinstance(part, StorePart)
    assert part.document_array("doc_length").dtype == np.int64


def test_columns_of_a_store_are_found(tmp_path):
    with StoreWriter(tmp_path / "s", vocab_size=5, columns={"a": "int8"}) as writer:
        writer.add([1], columns={"a": 3})
        writer.commit()
    assert open_store(tmp_path / "s").columns == ("a",)
    with pytest.raises(ValueError, match="must not hold a /"):
        StoreWriter(tmp_path / "t", vocab_size=5, columns={"a/b": "int8"})
    assert not list(tmp_path.glob("t*"))
