import os
import struct

import numpy as np
import pytest
from store_material import case_folder, golden_datasets

from mds_data import IndexedDatasetError, open_store
from mds_data.store.indexed_dataset import find_append_eod_fault, read_indexed_dataset


def write_pair(
    prefix,
    sequences,
    *,
    borders=None,
    dtype="<u2",
    code=8,
    magic=b"MMIDIDX\0\0",
    version=1,
    sizes=None,
    pointers=None,
    counts=None,
    tail=b"",
    data=None,
):
    ids = np.concatenate([np.array(item, dtype) for item in sequences] or [np.array([], dtype)])
    prefix.with_suffix(".bin").write_bytes(ids.tobytes() if data is None else data)
    lengths = np.array([len(item) for item in sequences], np.int64)
    if sizes is None:
        sizes = lengths
    if pointers is None:
        pointers = (np.cumsum(lengths) - lengths) * ids.itemsize
    if borders is None:
        borders = range(len(sequences) + 1)
    counts = (len(sizes), len(borders)) if counts is None else counts
    index = magic + struct.pack("<QBQQ", version, code, *counts)
    index += np.array(sizes, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index + np.array(borders, "<i8").tobytes() + tail)
    return prefix


DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
@pytest.mark.parametrize("tail", [b"", b"\0\0\0"])
def test_a_pair_opens_like_a_store(tmp_path, code, dtype, tail):
    prefix = write_pair(tmp_path / "p", DOCUMENTS, code=code, dtype=dtype, tail=tail)

    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        store = open_store(name)
        assert [item.tolist() for item in store] == DOCUMENTS
        assert store.tokens(2, 6).tolist() == [3, 4, 5, 6]
        assert store.dtype == dtype


def test_sequences_of_a_document_are_its_sentences(tmp_path):
    prefix = write_pair(tmp_path / "p", DOCUMENTS, borders=[0, 2, 2, 3])
    store = open_store(prefix)
    assert [item.tolist() for item in store] == [[1, 2, 3, 4, 5], [], [6, 7, 8, 9]]
    assert store.doc_sentences.tolist() == [2, 0, 1]
    assert store.sentence_length.tolist() == [3, 2, 4]


def test_the_older_format_opens_too(tmp_path):
    ids = np.array([1, 2, 3, 4, 5], "<i4")
    (tmp_path / "p.bin").write_bytes(ids.tobytes())
    header = b"TNTIDX\0\0" + struct.pack("<QQQQQQ", 1, 4, 4, 2, 2, 3)
    numbers = [0, 1, 2, 0, 3, 5, 3, 2, 0, 1, 2]
    (tmp_path / "p.idx").write_bytes(header + np.array(numbers, "<i8").tobytes())

    assert [item.tolist() for item in open_store(tmp_path / "p")] == [[1, 2, 3], [4, 5]]


def test_an_empty_pair_opens(tmp_path):
    store = open_store(write_pair(tmp_path / "p", []))
    assert len(store) == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"magic": b"NOTMAGIC\0"}, "does not begin like an index"),
        ({"version": 2}, "has version 2; only version 1"),
        ({"code": 6}, "type code 6, which is no whole-number type"),
        ({"code": 99}, "type code 99"),
        ({"counts": (2**60, 4)}, "sequences and 4 document borders take"),
        ({"counts": (3, 2**61)}, "document borders take"),
        ({"counts": (2, 4)}, "it was cut or is damaged"),
        ({"tail": b"\0\0"}, "it was cut or is damaged"),
        ({"sizes": [3, -1, 4]}, "gives sequence 1 the size -1"),
        ({"sizes": [3, 2, 2**31 - 1]}, "puts sequence 2 at tokens 5 to 2147483652, but the .bin"),
        ({"sizes": [4, 2, 4]}, "lets sequence 1 begin inside the one before"),
        ({"pointers": [0, 6, -2]}, "puts sequence 2 at tokens -1"),
        ({"pointers": [0, 6, 2**62]}, "puts sequence 2 at tokens"),
        ({"pointers": [0, 5, 10]}, "points sequence 1 between two tokens of 2 bytes"),
        ({"pointers": [10, 6, 0]}, r"puts sequence 0 at|begin inside"),
        ({"borders": [0, 1, 99, 3]}, "lets document 2 end before it begins"),
        ({"borders": [0, 1, 2, 99]}, "don't run from 0 to its 3 sequences"),
        ({"borders": [1, 2, 3]}, "don't run from 0"),
        ({"borders": []}, "don't run from 0"),
        ({"borders": [0, 3], "data": b"\0" * 40, "pointers": [0, 6, 20]}, "leaves a gap after"),
        ({"data": b"\0" * 17}, "the .bin file was cut"),
        ({"data": b""}, "the .bin file was cut"),
    ],
)
def test_an_index_that_lies_is_refused_in_one_sentence(tmp_path, options, reason):
    prefix = write_pair(tmp_path / "p", DOCUMENTS, **options)
    with pytest.raises(IndexedDatasetError, match=reason) as caught:
        open_store(prefix)
    assert str(caught.value).startswith(f"{prefix}.idx: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 8, 9, 20, 33, 60, 100])
def test_an_index_that_was_cut_is_refused(tmp_path, size):
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    os.truncate(f"{prefix}.idx", size)
    with pytest.raises(IndexedDatasetError):
        open_store(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_half_a_pair_is_refused(tmp_path, suffix):
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(IndexedDatasetError, match=f"p{suffix}: is missing"):
        open_store(prefix)


def test_random_bytes_never_crash_the_reader(tmp_path):
    random = np.random.default_rng(0)
    prefix = write_pair(tmp_path / "p", DOCUMENTS)
    data = prefix.with_suffix(".idx").read_bytes()
    for _ in range(500):
        broken = bytearray(data)
        for position in random.integers(0, len(data), 3):
            broken[position] = random.integers(256)
        prefix.with_suffix(".idx").write_bytes(broken)
        try:
            store = open_store(prefix)
        except IndexedDatasetError:
            continue
        for document in store:
            assert len(document) <= 9


def test_the_append_eod_fault_is_recognised():
    folder = golden_datasets()
    fault = find_append_eod_fault(read_indexed_dataset(folder / "pydoc_text_document"))
    assert (fault.eod_id, fault.documents) == (599, 79)
    assert find_append_eod_fault(read_indexed_dataset(folder / "pydocss_text_sentence")) is None


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ([1, 2, 3, 99, 4, 5, 99, 6, 7, 8, 9, 99], True),
        ([1, 2, 3, 99, 4, 5, 98, 6, 7, 8, 9, 99], False),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 99], False),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], False),
    ],
)
def test_the_fault_is_told_from_other_surplus(tmp_path, data, fault):
    pair = write_pair(tmp_path / "p", DOCUMENTS, data=np.array(data, "<u2").tobytes())
    assert (find_append_eod_fault(read_indexed_dataset(pair)) is not None) == fault


def test_a_pair_of_a_bug_report_opens():
    folder = case_folder("B08") / "in"
    assert [item.tolist() for item in open_store(folder / "two")] == [[7], [8, 9, 10]]
