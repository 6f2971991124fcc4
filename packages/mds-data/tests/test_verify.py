import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from store_material import golden_datasets, random_documents, write_small

from mds_data import StoreWriter, open_store
from mds_data.store.schema import FileRecord, manifest_to_json
from mds_data.store.verify import verify_store


@pytest.fixture
def path(tmp_path):
    write_small(tmp_path / "s", random_documents(20, longest=100))
    return tmp_path / "s"


def test_a_sound_store_is_called_sound(path):
    report = verify_store(path)
    assert report.sound
    assert report.notes == ()
    assert report.documents == 20
    assert report.files == len(open_store(path).manifest.files)
    assert report.size == sum(file.size for file in open_store(path).manifest.files.values())


def test_every_flipped_bit_is_found_and_its_file_named(path):
    random = np.random.default_rng(0)
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        data = file.read_bytes()
        for position in random.integers(0, len(data), 40).tolist():
            flipped = bytearray(data)
            flipped[position] ^= 1 << int(random.integers(8))
            file.write_bytes(flipped)

            report = verify_store(path)

            name = file.relative_to(path).as_posix()
            assert any(name in problem for problem in report.problems), (name, report)
        file.write_bytes(data)
    assert verify_store(path).sound


def test_damage_in_a_shard_is_located(path):
    file = path / "tokens/c/1"
    data = bytearray(file.read_bytes())
    data[132 * 2 + 5] ^= 1
    file.write_bytes(data)
    (problem,) = verify_store(path).problems
    assert "tokens/c/1: the content differs" in problem
    assert "1 chunk 2: the checksum differs" in problem


def test_missing_and_truncated_files_are_all_named(path):
    (path / "tokens/c/0").unlink()
    os.truncate(path / "tokens/c/1", 9)
    (path / "doc_start/zarr.json").unlink()
    problems = verify_store(path).problems
    assert len(problems) == 3
    assert any("tokens/c/0: is missing" in problem for problem in problems)
    assert any("tokens/c/1: has 9 bytes" in problem for problem in problems)
    assert any("doc_start/zarr.json: is missing" in problem for problem in problems)


def test_a_shard_of_another_store_is_called_foreign(path, tmp_path):
    write_small(tmp_path / "other", random_documents(20, seed=5, longest=300))
    shutil.copy(tmp_path / "other/tokens/c/0", path / "tokens/c/0")
    (problem,) = verify_store(path).problems
    assert "tokens/c/0: the content differs" in problem
    assert "another store's shard" in problem


def test_swapped_shards_are_found(path):
    one, two = path / "tokens/c/0", path / "tokens/c/1"
    if one.stat().st_size == two.stat().st_size:
        one.rename(path / "x")
        two.rename(one)
        (path / "x").rename(two)
    assert len(verify_store(path).problems) == 2


def test_files_that_do_not_belong_are_noted(path):
    (path / "tokens/c/99").write_bytes(b"x")
    (path / "notes.txt").write_text("mine")
    report = verify_store(path)
    assert report.sound
    assert len(report.notes) == 2
    assert "is not part of the store" in report.notes[0]


def forge(path, name, values):
    """Put other values into an array, with checksums and manifest made right again."""
    import zarr

    zarr.open_array(path / name)[:] = values
    manifest = open_manifest(path)
    files = dict(manifest.files)
    import hashlib

    for file in files:
        data = (path / file).read_bytes()
        files[file] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    (path / "manifest.json").write_bytes(manifest_to_json(replace(manifest, files=files)))


def open_manifest(path):
    from mds_data.store.folder import read_manifest

    return read_manifest(path)[0]


def test_documents_out_of_order_are_found(path):
    starts = open_store(path).doc_start.copy()
    starts[[3, 9]] = starts[[9, 3]]
    forge(path, "doc_start", starts)
    (problem,) = verify_store(path).problems
    assert "document" in problem
    assert "overlaps its neighbour or leaves" in problem


@pytest.mark.parametrize("length", [-1, 2**62])
def test_impossible_lengths_are_found(path, length):
    lengths = open_store(path).doc_length.copy()
    lengths[5] = length
    forge(path, "doc_length", lengths)
    (problem,) = verify_store(path).problems
    assert "document 5 starts at" in problem


def test_tokens_outside_the_vocabulary_are_found(path):
    store = open_store(path)
    ids = store.tokens(0, store.num_positions).copy()
    ids[300] = 1000
    forge(path, "tokens", ids)
    (problem,) = verify_store(path).problems
    assert "tokens/c/1 chunk 0: token 1000 at position 300 is outside the vocabulary" in problem


def test_wrong_counts_are_found(path):
    manifest = open_manifest(path)
    wrong = replace(manifest, counts=replace(manifest.counts, tokens=5))
    (path / "manifest.json").write_bytes(manifest_to_json(wrong))
    (problem,) = verify_store(path).problems
    assert "says 5 tokens, and the documents hold" in problem


def test_sentences_that_do_not_add_up_are_found(tmp_path):
    path = tmp_path / "s"
    with StoreWriter(path, vocab_size=10, sentences=True) as writer:
        writer.add([1, 2, 3], sentence_lengths=[1, 1])
        writer.commit()
    (problem,) = verify_store(path).problems
    assert "the sentences of document 0 don't add up to its 3 tokens" in problem


def test_a_broken_manifest_is_a_problem_not_a_crash(path):
    (path / "manifest.json").write_text("{")
    (problem,) = verify_store(path).problems
    assert "manifest.json: is not valid JSON" in problem


def test_nothing_at_the_path_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such store"):
        verify_store(tmp_path / "nothing")


def test_a_pair_with_the_append_eod_fault_is_found():
    (problem,) = verify_store(golden_datasets() / "pydoc_text_document").problems
    assert "--append-eod fault: the end token 599 of each of 79 documents" in problem
    assert verify_store(golden_datasets() / "pydocss_text_sentence").sound


def test_a_manifest_that_asks_for_more_is_refused(path):
    value = json.loads((path / "manifest.json").read_text())
    value["requires"] = ["holograms/1"]
    (path / "manifest.json").write_text(json.dumps(value))
    (problem,) = verify_store(path).problems
    assert "requires 'holograms/1'" in problem
