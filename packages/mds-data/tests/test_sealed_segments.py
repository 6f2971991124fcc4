"""A sealed file: any part can be read, and a segment opens in its own place only."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mds_data import (
    SealedError,
)
from mds_data.encryption.segments import FileKey, SealedFile, cut_at, sealed_blocks, sealed_size

KEY = FileKey(data_key=bytes(range(32)), folder=bytes(16), path="a/b", file_id=b"1" * 16)


def sealed_bytes(content, *, key=KEY, cut=16):
    read = io.BytesIO(content).read
    return b"".join(sealed_blocks(read, size=len(content), cut=cut, key=key))


def check_sealed(stored, *, key=KEY):
    SealedFile(lambda at, count: stored[at : at + count], len(stored), key=key, name="f").check()


@pytest.mark.parametrize("what", ["order", "path", "folder", "header", "last", "table"])
def test_a_segment_opens_in_its_own_place_only(what):
    """By the cipher alone, before any digest of the whole file is looked at."""
    stored, key = sealed_bytes(bytes(range(48))), KEY
    check_sealed(stored)
    if what == "order":
        stored = stored[:64] + stored[96:128] + stored[64:96] + stored[128:]
    elif what == "path":
        key = replace(KEY, path="a/c")
    elif what == "folder":
        key = replace(KEY, folder=b"x" * 16)
    elif what == "header":  # the minor version says nothing else
        stored = stored[:10] + b"\x01" + stored[11:]
    elif what == "last":
        header = bytearray(stored[:64])
        header[16], header[24] = 32, 2
        stored = bytes(header) + stored[64:128]
    else:
        lengths = [16, 32]
        blocks = list(sealed_blocks(io.BytesIO(bytes(48)).read, size=48, cut=lengths, key=KEY))
        flipped = bytes([blocks[1][0] ^ 1])
        stored = blocks[0] + flipped + blocks[1][1:] + b"".join(blocks[2:])

    with pytest.raises(SealedError, match="does not open"):
        check_sealed(stored, key=key)


def test_an_older_file_of_the_same_path_is_refused():
    """The file id tells two states of one path apart, under one key."""
    old = sealed_bytes(b"old")

    with pytest.raises(SealedError, match="an older one"):
        check_sealed(old, key=replace(KEY, file_id=b"2" * 16))
    with pytest.raises(SealedError, match="does not open"):  # nor with a forged header
        check_sealed(old[:32] + b"2" * 16 + old[48:], key=replace(KEY, file_id=b"2" * 16))


@pytest.mark.parametrize("cut", [1, 7, 64, [0, 5, 0, 95], [100]])
def test_any_part_of_a_sealed_file_can_be_read(cut):
    plain = bytes(range(100))
    key = FileKey(data_key=bytes(32), folder=bytes(16), path="p", file_id=bytes(16))
    parts = memoryview(plain)
    position = 0

    def read(count):
        nonlocal position
        position += count
        return parts[position - count : position]

    stored = b"".join(sealed_blocks(read, size=100, cut=cut, key=key))
    file = SealedFile(lambda at, count: stored[at : at + count], len(stored), key=key, name="f")

    assert len(stored) == sealed_size(100, cut)
    for start, stop in [(0, 100), (0, 0), (3, 50), (63, 65), (99, 100), (5, 6), (100, 100)]:
        assert bytes(file.read(start, stop)) == plain[start:stop]
    with pytest.raises(SealedError, match="ends at byte 100"):
        file.read(0, 101)
    for end in range(0, len(stored), 9):
        with pytest.raises(SealedError):
            SealedFile(lambda at, count: stored[at : at + count], end, key=key, name="f").check()


@pytest.mark.parametrize("cut", [2**20, 2**14, 300_000, [5, 2**20, 0, 2**20 - 5, 7, 2**19, 2**18]])
@pytest.mark.parametrize("in_place", [True, False])
def test_blocks_hold_whole_segments_and_old_libraries_write_the_same(monkeypatch, cut, in_place):
    """Libraries before cryptography 47 can't seal into a place."""
    plain = np.random.default_rng(1).bytes(sum(cut) if isinstance(cut, list) else 2_700_000)
    stored = sealed_bytes(plain, cut=cut)
    if not in_place:

        class Older:
            def __init__(self, key):
                aes = AESGCM(key)
                self.encrypt, self.decrypt = aes.encrypt, aes.decrypt

        monkeypatch.setattr("cryptography.hazmat.primitives.ciphers.aead.AESGCM", Older)
        assert sealed_bytes(plain, cut=cut) == stored
    file = SealedFile(lambda at, count: stored[at : at + count], len(stored), key=KEY, name="f")

    blocks = list(file.blocks())

    assert b"".join(blocks) == plain
    assert max(map(len, blocks)) <= 2**20
    assert bytes(file.read(3, 2_500_001)) == plain[3:2_500_001]


def test_segments_end_where_chunks_do():
    assert cut_at([0, 10, 20], 25) == 10
    assert cut_at([0, 10, 20], 35) == [10, 10, 15]
    assert cut_at([0, 10, 15], 20) == [10, 5, 5]
    assert cut_at([], 0) == 2**20
