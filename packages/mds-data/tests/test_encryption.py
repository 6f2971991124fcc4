"""An encrypted store reads as the plain one does, and decrypting gives its very bytes."""

from __future__ import annotations

import os
import pickle
import shutil

import numpy as np
import pytest
from encryption_material import DOCUMENTS, tree
from sentence_material import sentence_store
from store_material import assert_holds, run_killed, write_small

from mds_data import (
    BertDataset,
    DataError,
    GPTDataset,
    KeySource,
    SealedError,
    StoreError,
    open_store,
)
from mds_data.datasets.sentence_dataset import store_vocabulary
from mds_data.encryption import keys, segments
from mds_data.store.commit import FileOperations
from mds_data.store.encrypt import decrypt_store, encrypt_store, rotate_key
from mds_data.store.erase import erase_documents
from mds_data.store.merge import merge_stores
from mds_data.store.verify import verify_store


def test_documents_and_samples_are_those_of_the_plain_store(plain, sealed, identity):
    one, other = open_store(plain), open_store(sealed, key=identity[1])

    assert_holds(other, DOCUMENTS)
    np.testing.assert_array_equal(one.doc_start, other.doc_start)
    np.testing.assert_array_equal(
        one.tokens(0, one.num_positions), other.tokens(0, one.num_positions)
    )
    first, second = (GPTDataset(store, seq_length=16, split=None) for store in (one, other))
    for number in (0, len(first) // 2, len(first) - 1):
        np.testing.assert_array_equal(first.window(number), second.window(number))
    assert_holds(pickle.loads(pickle.dumps(other)), DOCUMENTS)


def test_decrypting_gives_the_very_bytes_that_were_encrypted(plain, sealed, identity, tmp_path):
    decrypt_store(sealed, tmp_path / "again", key=identity[1])

    assert tree(tmp_path / "again") == tree(plain)


def test_one_inner_chunk_is_one_segment(plain, sealed, identity, monkeypatch):
    part = open_store(sealed, key=identity[1]).parts[0]
    file = part.folder.file("tokens/c/0")
    chunks = part.tokens.layout.chunks_per_shard
    opened = []
    real = segments._Cipher.open
    monkeypatch.setattr(
        segments._Cipher,
        "open",
        lambda self, data, number, kind: opened.append(number) or real(self, data, number, kind),
    )

    file.read(*_chunk_range(plain, 1))

    assert opened == [1]
    assert file.count == chunks + 1


def _chunk_range(plain, number):
    part = open_store(plain).parts[0]
    part.tokens.read(0, 1)
    offset, length = part.tokens._shards[0].index[number]
    return int(offset), int(offset + length)


@pytest.mark.parametrize(
    "change",
    [
        lambda store: erase_documents(store, [1], reason="x"),
        lambda store: merge_stores([store, store], store.with_name("merged")),
        lambda store: encrypt_store(store, store.with_name("twice"), recipients=["age1"]),
    ],
)
def test_what_needs_a_plain_store_says_so(sealed, change):
    before = tree(sealed)

    with pytest.raises(SealedError, match="mds-data decrypt"):
        change(sealed)

    assert tree(sealed) == before


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@needs_fork
@pytest.mark.parametrize("step", ["encrypt", "decrypt", "rotate"])
def test_a_kill_anywhere_leaves_the_old_or_the_new(tmp_path, step, identity):
    """Every operation in turn; what a dead one left is no obstacle for the next."""
    recipient, key = identity
    # Few and small files, so that all operations can be tried.
    write_small(tmp_path / "plain", DOCUMENTS[:3], chunks_per_shard=64)
    encrypt_store(tmp_path / "plain", tmp_path / "sealed", recipients=[recipient])
    newer = keys.new_identity(tmp_path / "new.txt")
    new_key = KeySource(identity=tmp_path / "new.txt")

    def start(last):
        folder = tmp_path / f"{step}-{last}"
        folder.mkdir()
        shutil.copytree(tmp_path / "sealed", folder / "sealed")
        return folder

    def act(folder, operations):
        if step == "encrypt":
            encrypt_store(
                tmp_path / "plain", folder / "out", recipients=[recipient], operations=operations
            )
        elif step == "decrypt":
            decrypt_store(folder / "sealed", folder / "out", key=key, operations=operations)
        else:
            rotate_key(folder / "sealed", old=key, recipients=[newer], operations=operations)

    def opens(folder):
        store = folder / ("sealed" if step == "rotate" else "out")
        for each in (key, new_key):
            try:
                return verify_store(store, key=each).sound
            except DataError:
                continue
        return False

    last, died = 0, True
    while died:
        last += 1
        folder = start(last)
        died = run_killed(lambda operations: act(folder, operations), last, torn=True)  # noqa: B023
        if step != "rotate" and not (folder / "out").exists():
            assert died
            act(folder, FileOperations())
        assert opens(folder), last
        shutil.rmtree(folder)
    assert last > 8


def test_masked_samples_of_an_encrypted_store_take_the_tokenizer_given(tmp_path, identity):
    recipient, key = identity
    one = sentence_store(tmp_path)
    encrypt_store(one.path, tmp_path / "sealed", recipients=[recipient])
    other = open_store(tmp_path / "sealed", key=key)
    with pytest.raises(StoreError, match="give the tokenizer"):
        BertDataset(other, seq_length=32, num_samples=3)
    vocabulary = store_vocabulary(one, None)

    first, second = (
        BertDataset(store, seq_length=32, num_samples=3, vocabulary=vocabulary)
        for store in (one, other)
    )

    np.testing.assert_array_equal(first[2]["tokens"], second[2]["tokens"])
