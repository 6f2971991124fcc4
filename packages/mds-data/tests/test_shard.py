import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mds_data.errors import DamagedError
from mds_data.store.array_metadata import ArrayLayout
from mds_data.store.shard import (
    ABSENT,
    checksum,
    decode_chunk,
    decode_index,
    encode_chunk,
    encode_index,
)


def layout(*, compressed=False, chunk=16, chunks=4, length=40):
    return ArrayLayout(
        length=length,
        dtype=np.dtype("<u2"),
        chunk=chunk,
        chunks_per_shard=chunks,
        compressed=compressed,
    )


def as_array(data):
    return np.frombuffer(data, np.uint8)


def test_the_checksum_is_the_castagnoli_crc():
    assert checksum(b"123456789") == 0xE3069283
    values = np.arange(1000, dtype="<u2")
    assert checksum(values) == checksum(values.tobytes())


@pytest.mark.parametrize("compressed", [False, True])
@given(values=st.lists(st.integers(0, 65535), max_size=16))
@settings(max_examples=30, deadline=None)
def test_a_chunk_comes_back_padded_with_zeros(compressed, values):
    data = encode_chunk(np.array(values, "<u2"), layout=layout(compressed=compressed))

    decoded = decode_chunk(as_array(data), layout=layout(compressed=compressed), name="c")

    assert decoded.tolist() == values + [0] * (16 - len(values))


@pytest.mark.parametrize("compressed", [False, True])
def test_every_flipped_bit_of_a_chunk_is_noticed(compressed):
    data = encode_chunk(np.arange(16, dtype="<u2"), layout=layout(compressed=compressed))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8

        with pytest.raises(DamagedError, match="c/0 chunk 3: the checksum differs"):
            decode_chunk(
                as_array(bytes(flipped)), layout=layout(compressed=compressed), name="c/0 chunk 3"
            )


def test_a_compressed_chunk_can_not_grow_beyond_its_size():
    bomb = layout(compressed=True, chunk=2**20)
    data = encode_chunk(np.zeros(2**20, "<u2"), layout=bomb)

    with pytest.raises(DamagedError, match="declares 2097152 bytes of content, not 32"):
        decode_chunk(as_array(data), layout=layout(compressed=True), name="c")


@pytest.mark.parametrize("payload", [b"", b"x", b"not zstd at all", b"\x28\xb5\x2f\xfd\x20\x20"])
def test_what_is_no_zstd_frame_is_refused(payload):
    data = payload + checksum(payload).to_bytes(4, "little")
    with pytest.raises(DamagedError):
        decode_chunk(as_array(data), layout=layout(compressed=True), name="c")


def index_of(*entries):
    rows = [*entries, *[(ABSENT, ABSENT)] * (4 - len(entries))]
    return encode_index(np.array(rows, np.uint64))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([(0, 36), (ABSENT, ABSENT)], "chunk 1 is missing"),
        ([(0, 36), (36, 37)], "points outside"),
        ([(0, 36), (2**63, 2**63)], "points outside"),
        ([(0, 36), (2**64 - 2, 4)], "points outside"),
        ([(36, 36), (0, 36)], "overlap or are out of order"),
        ([(0, 36), (35, 36)], "overlap or are out of order"),
    ],
)
def test_an_index_that_lies_is_refused(entries, reason):
    with pytest.raises(DamagedError, match=reason):
        decode_index(index_of(*entries), layout=layout(), file_size=72 + 68, used=2, name="c/0")


def test_an_index_with_a_wrong_checksum_is_refused():
    data = bytearray(index_of((0, 36)))
    data[3] ^= 1
    with pytest.raises(DamagedError, match="c/0: the checksum of the shard index differs"):
        decode_index(bytes(data), layout=layout(), file_size=36 + 68, used=1, name="c/0")
