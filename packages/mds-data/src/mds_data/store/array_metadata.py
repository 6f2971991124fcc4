"""How a 1-D array lies in its shards, and the zarr.json that says so. No files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mds_data.errors import ManifestError
from mds_data.store.records import Layout
from mds_data.store.strict_json import parse_json

__all__ = [
    "CHECKSUM_SIZE",
    "ZSTD_LEVEL",
    "ArrayLayout",
    "array_layout_from_json",
    "layout_for_documents",
    "layout_for_tokens",
    "metadata_json",
]

CHECKSUM_SIZE = 4
"""Bytes of a crc32c."""
ZSTD_LEVEL = 12
"""5 to 8 % fewer bytes than level 3, decompressed as fast; tokens pass at millions a second."""
_LARGEST_CHUNK = 2**26
"""Bytes of an inner chunk that a reader is willing to decode at once."""
_DTYPES = {
    "bool": "?",
    "int8": "i1",
    "uint8": "u1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
    "float32": "<f4",
    "float64": "<f8",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayLayout:
    """How a 1-D array lies in its shards; all extents in elements."""

    length: int
    dtype: np.dtype[Any]
    chunk: int
    """Elements of an inner chunk."""
    chunks_per_shard: int
    compressed: bool

    @property
    def shard(self) -> int:
        """Elements of a shard."""
        return self.chunk * self.chunks_per_shard

    @property
    def num_shards(self) -> int:
        """Shards that the array has."""
        return -(-self.length // self.shard)

    @property
    def num_chunks(self) -> int:
        """Inner chunks that the array has."""
        return -(-self.length // self.chunk)

    @property
    def chunk_size(self) -> int:
        """Bytes of a raw inner chunk with its checksum."""
        return self.chunk * self.dtype.itemsize + CHECKSUM_SIZE

    @property
    def index_size(self) -> int:
        """Bytes of a shard's index with its checksum."""
        return 16 * self.chunks_per_shard + CHECKSUM_SIZE


def layout_for_tokens(
    layout: Layout,
    *,
    dtype: np.dtype[Any],
    chunk: int | None = None,
    chunks_per_shard: int | None = None,
) -> ArrayLayout:
    """The sizes that this package writes for ``tokens``.

    A shard holds 33,554,432 tokens in the hot layout and 16,777,216 in the archive layout, whose
    small chunks make a random read cheap and would need an index of 128 KiB otherwise. A hot chunk
    is read whole when it is first touched, so it is small; smaller ones would be joined too often.
    """
    hot = layout == "hot"
    usual_chunk, usual_number = (16_384, 2_048) if hot else (4_096, 4_096)
    chunk = usual_chunk if chunk is None else chunk
    number = usual_number if chunks_per_shard is None else chunks_per_shard
    if not 1 <= chunk * dtype.itemsize <= _LARGEST_CHUNK or not 1 <= number <= 2**20:
        raise ValueError(f"a shard can't have {number} inner chunks of {chunk} tokens")
    return ArrayLayout(
        length=0, dtype=dtype, chunk=chunk, chunks_per_shard=number, compressed=not hot
    )


def layout_for_documents(dtype: np.dtype[Any]) -> ArrayLayout:
    """The sizes that this package writes for arrays with one entry a document or sentence."""
    return ArrayLayout(length=0, dtype=dtype, chunk=16_384, chunks_per_shard=128, compressed=True)


def metadata_json(
    layout: ArrayLayout, *, dimension: str, attributes: Mapping[str, Any] | None = None
) -> bytes:
    """The zarr.json of an array, as zarr-python writes it."""
    metadata = json.loads(_empty_array_json(replace(layout, length=0), dimension))
    metadata["shape"] = [layout.length]
    metadata["attributes"] = dict(attributes or {})
    return json.dumps(metadata, indent=2).encode()


@cache
def _empty_array_json(layout: ArrayLayout, dimension: str) -> bytes:
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec
    from zarr.storage import MemoryStore

    files: dict[str, Any] = {}
    zstd = [ZstdCodec(level=ZSTD_LEVEL)] if layout.compressed else []
    zarr.create_array(
        store=MemoryStore(files),
        shape=(0,),
        dtype=layout.dtype,
        chunks=(layout.chunk,),
        shards=(layout.shard,),
        compressors=[*zstd, Crc32cCodec()],
        fill_value=0,
        dimension_names=[dimension],
    )
    return bytes(files["zarr.json"].to_bytes())


def array_layout_from_json(data: bytes, *, name: str) -> ArrayLayout:
    """Read the zarr.json of an array strictly: one dimension, sharded, checksummed."""
    if len(data) > 2**20:
        raise ManifestError(
            f"{name}: has {len(data)} bytes; an array's metadata holds at most 1 MiB"
        )
    members = parse_json(data, name=name)
    if members.get("zarr_format") != 3 or members.get("node_type") != "array":
        raise ManifestError(f"{name}: must describe a Zarr v3 array")
    length = _extent(members.get("shape"), low=0, high=2**60, name=name, member="shape")
    dtype = _DTYPES.get(str(members.get("data_type")))
    if dtype is None:
        raise ManifestError(
            f"{name}: data_type {str(members.get('data_type'))[:60]!r} is not supported"
        )
    grid = _named(members.get("chunk_grid"), "regular", name=name)
    shard = _extent(grid.get("chunk_shape"), low=1, high=2**40, name=name, member="chunk_shape")
    keys = _named(members.get("chunk_key_encoding"), "default", name=name)
    if keys.get("separator", "/") != "/" or members.get("storage_transformers"):
        raise ManifestError(
            f"{name}: chunks must have keys c/0, c/1, ... and no storage transformer"
        )
    if members.get("fill_value", 0) != 0:  # what other readers put where chunks are missing
        raise ManifestError(
            f"{name}: fill_value must be 0, not {str(members.get('fill_value'))[:60]!r}"
        )
    chunk, compressed = _sharding(members.get("codecs"), name=name)
    itemsize = np.dtype(dtype).itemsize
    if shard % chunk or chunk * itemsize > _LARGEST_CHUNK or shard // chunk > 2**24:
        raise ManifestError(f"{name}: a shard of {shard} can't be cut into inner chunks of {chunk}")
    return ArrayLayout(
        length=length,
        dtype=np.dtype(dtype),
        chunk=chunk,
        chunks_per_shard=shard // chunk,
        compressed=compressed,
    )


def _extent(value: object, *, low: int, high: int, name: str, member: str) -> int:
    if not isinstance(value, list) or len(value) != 1 or type(value[0]) is not int:
        raise ManifestError(f"{name}: {member} must be a list of one whole number")
    extent: int = value[0]
    if not low <= extent <= high:
        raise ManifestError(f"{name}: {member} must lie from {low} to {high}, not {extent}")
    return extent


def _named(value: object, expected: str, *, name: str) -> Mapping[str, Any]:
    """The configuration of a Zarr v3 extension point, which must be ``expected``."""
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or value.get("name") != expected:
        found = value.get("name") if isinstance(value, dict) else value
        raise ManifestError(f"{name}: expected {expected!r}, found {str(found)[:60]!r}")
    configuration = value.get("configuration", {})
    if not isinstance(configuration, dict):
        raise ManifestError(f"{name}: the configuration of {expected!r} must be an object")
    return configuration


def _sharding(codecs: object, *, name: str) -> tuple[int, bool]:
    """Length of an inner chunk, and whether it is compressed."""
    if not isinstance(codecs, list) or len(codecs) != 1:
        raise ManifestError(f"{name}: must have exactly one codec, sharding_indexed")
    sharding = _named(codecs[0], "sharding_indexed", name=name)
    if sharding.get("index_location", "end") != "end":
        raise ManifestError(f"{name}: the shard index must be at the end")
    if _codec_names(sharding.get("index_codecs"), name=name) != ["bytes", "crc32c"]:
        raise ManifestError(f"{name}: the shard index must have the codecs bytes, crc32c")
    inner = _codec_names(sharding.get("codecs"), name=name)
    if inner not in (["bytes", "crc32c"], ["bytes", "zstd", "crc32c"]):
        raise ManifestError(f"{name}: inner codecs must be bytes, (zstd), crc32c, not {inner}")
    extent = _extent(
        sharding.get("chunk_shape"), low=1, high=2**31, name=name, member="inner chunk_shape"
    )
    return extent, "zstd" in inner


def _codec_names(codecs: object, *, name: str) -> list[str]:
    if not isinstance(codecs, list):
        raise ManifestError(f"{name}: codecs must be a list")
    names = [codec if isinstance(codec, str) else codec.get("name") for codec in codecs if codec]
    for codec in codecs:
        if isinstance(codec, dict) and codec.get("name") == "bytes":
            endian = _named(codec, "bytes", name=name).get("endian", "little")
            if endian != "little":
                raise ManifestError(f"{name}: elements must be little endian")
    return [str(item)[:60] for item in names]
