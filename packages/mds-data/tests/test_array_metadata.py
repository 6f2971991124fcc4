import json

import numpy as np
import pytest

from mds_data.errors import ManifestError
from mds_data.store.array_metadata import (
    ArrayLayout,
    array_layout_from_json,
    layout_for_tokens,
    metadata_json,
)


def layout(*, compressed=False):
    return ArrayLayout(
        length=40,
        dtype=np.dtype("<u2"),
        chunk=16,
        chunks_per_shard=4,
        compressed=compressed,
    )


@pytest.mark.parametrize("compressed", [False, True])
def test_metadata_says_the_layout(compressed):
    given = layout(compressed=compressed)
    data = metadata_json(given, dimension="token")

    assert array_layout_from_json(data, name="z") == given
    assert json.loads(data)["dimension_names"] == ["token"]


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_what_a_first_touch_reads_of_a_hot_store_is_little(dtype):
    hot = layout_for_tokens("hot", dtype=np.dtype(dtype))

    assert hot.chunk_size <= 2**16 + 4
    assert hot.chunk.bit_count() == 1  # or the fast reader could not mask
    assert hot.index_size < hot.shard * hot.dtype.itemsize / 1000


def alter(path, value):
    metadata = json.loads(metadata_json(layout(), dimension="token"))
    place = metadata
    *above, last = path
    for key in above:
        place = place[key]
    place[last] = value
    return json.dumps(metadata).encode()


SHARDING = ("codecs", 0, "configuration")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("zarr_format",), 2),
        (("node_type",), "group"),
        (("shape",), [2**60 + 1]),
        (("shape",), [-1]),
        (("shape",), [4, 4]),
        (("shape",), [4.0]),
        (("shape",), "4"),
        (("data_type",), "complex64"),
        (("data_type",), {"name": "object"}),
        (("chunk_grid",), {"name": "rectangular"}),
        (("chunk_grid", "configuration", "chunk_shape"), [0]),
        (("chunk_grid", "configuration", "chunk_shape"), [63]),
        (("chunk_key_encoding", "configuration", "separator"), "."),
        (("storage_transformers",), [{"name": "x"}]),
        (("codecs",), []),
        (("codecs",), [{"name": "pickle"}]),
        (("codecs", 0, "configuration"), 3),
        ((*SHARDING, "chunk_shape"), [0]),
        ((*SHARDING, "index_location"), "start"),
        ((*SHARDING, "index_codecs"), [{"name": "bytes"}]),
        ((*SHARDING, "codecs"), [{"name": "bytes"}]),
        ((*SHARDING, "codecs"), [{"name": "bytes"}, {"name": "gzip"}, {"name": "crc32c"}]),
        (
            (*SHARDING, "codecs"),
            [{"name": "bytes", "configuration": {"endian": "big"}}, {"name": "crc32c"}],
        ),
    ],
)
def test_metadata_of_other_arrays_is_refused(path, value):
    with pytest.raises(ManifestError, match=r"tokens/zarr\.json: "):
        array_layout_from_json(alter(path, value), name="tokens/zarr.json")


def test_large_metadata_is_refused():
    with pytest.raises(ManifestError, match="at most 1 MiB"):
        array_layout_from_json(b" " * (2**20 + 1), name="z")
