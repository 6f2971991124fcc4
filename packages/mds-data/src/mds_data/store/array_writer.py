"""Stream a 1-D array into shard files, one inner chunk in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mds_data.store.array_metadata import ArrayLayout, metadata_json
from mds_data.store.commit import FileOperations, OutputFile, put_file
from mds_data.store.records import FileRecord
from mds_data.store.shard import ABSENT, encode_chunk, encode_index

__all__ = ["ArrayState", "Place", "ShardedArrayWriter"]


class Place(Protocol):
    """Where the files of a store are written: a new folder, or names that wait for a commit."""

    operations: FileOperations

    def file(self, relative: str) -> Path:
        """The path for a new file of the store; the folders above it exist."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayState:
    """All that a writer needs to go on with an array whose files are on the disk."""

    length: int
    shards: int
    """Shards that are closed."""
    files: Mapping[str, FileRecord]
    """The closed shards."""
    chunk_sizes: Sequence[int]
    """Bytes of each chunk in the open shard, in order."""
    waiting: bytes = field(repr=False)
    """Elements that fill no chunk yet."""
    attributes: Mapping[str, Any]


class ShardedArrayWriter:
    """Stream one 1-D array into shard files, one inner chunk in memory.

    Args:
        place: Where the files of the store go.
        name: The array's path inside the store.
        layout: Sizes and codec; its length is ignored.
        dimension: Name of the array's one dimension.
        first_shard: Number of the shard to begin with; the ones before stay as they are.
        attributes: What the array's zarr.json says beside its shape; may change until `close`.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        *,
        layout: ArrayLayout,
        dimension: str,
        first_shard: int = 0,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        self.length = first_shard * layout.shard
        """Elements of the array, those of earlier shards included."""
        self.files: dict[str, FileRecord] = {}
        self.attributes = dict(attributes or {})
        self._place = place
        self._name = name
        self._layout = layout
        self._dimension = dimension
        self._buffer = np.zeros(layout.chunk, layout.dtype)
        self._filled = 0
        self._output: OutputFile | None = None
        self._index = np.full((layout.chunks_per_shard, 2), ABSENT, np.uint64)
        self._chunks = 0
        self._shards = first_shard

    def append(self, values: NDArray[Any]) -> None:
        """Add elements at the end."""
        self.length += len(values)
        chunk = self._layout.chunk
        if self._filled + len(values) < chunk:  # the common case: a document inside a chunk
            self._buffer[self._filled : self._filled + len(values)] = values
            self._filled += len(values)
            return
        start = chunk - self._filled if self._filled else 0
        if start:
            self._buffer[self._filled :] = values[:start]
            self._put_chunk(self._buffer)
        whole = start + (len(values) - start) // chunk * chunk
        for position in range(start, whole, chunk):
            self._put_chunk(values[position : position + chunk])
        self._filled = len(values) - whole
        self._buffer[: self._filled] = values[whole:]

    def close(self) -> dict[str, FileRecord]:
        """Write what is left and zarr.json; the records of all files that were written."""
        self.finish_shard()
        layout = replace(self._layout, length=self.length)
        path = f"{self._name}/zarr.json"
        self.files[path] = put_file(
            self._place.file(path),
            metadata_json(layout, dimension=self._dimension, attributes=self.attributes),
            operations=self._place.operations,
        )
        return self.files

    def finish_shard(self) -> None:
        """Write the chunk that is not full and close the shard; nothing may follow in it."""
        if self._filled:
            self._put_chunk(self._buffer[: self._filled])
            self._filled = 0
        self._close_shard()

    def abandon(self) -> None:
        """Close the open shard as it is."""
        if self._output is not None:
            self._output.abandon()

    def save(self) -> ArrayState:
        """Bring what was written to the disk, and say how another writer goes on from here."""
        if self._output is not None:
            self._output.sync()
        return ArrayState(
            length=self.length,
            shards=self._shards,
            files=dict(self.files),
            chunk_sizes=self._index[: self._chunks, 1].tolist(),
            waiting=self._buffer[: self._filled].tobytes(),
            attributes=dict(self.attributes),
        )

    def restore(self, state: ArrayState) -> None:
        """Go on where `save` was called; ``place`` holds the files.

        Raises:
            StoreError: The open shard is shorter than it was then.
        """
        sizes = np.asarray(state.chunk_sizes, np.uint64)
        self.length, self._shards, self.files = state.length, state.shards, dict(state.files)
        self.attributes = dict(state.attributes)
        self._chunks = len(sizes)
        self._index[: len(sizes), 1] = sizes
        self._index[: len(sizes), 0] = np.cumsum(sizes) - sizes
        waiting = np.frombuffer(state.waiting, self._layout.dtype)
        self._filled = len(waiting)
        self._buffer[: len(waiting)] = waiting
        if len(sizes):
            self._output = OutputFile.resumed(
                self._place.file(f"{self._name}/c/{self._shards}"),
                size=int(sizes.sum()),
                operations=self._place.operations,
            )

    def _put_chunk(self, values: NDArray[Any]) -> None:
        if self._output is None:
            path = self._place.file(f"{self._name}/c/{self._shards}")
            self._output = OutputFile(path, operations=self._place.operations)
        data = encode_chunk(values, layout=self._layout)
        self._index[self._chunks] = self._output.size, len(data)
        self._output.write(data)
        self._chunks += 1
        if self._chunks == self._layout.chunks_per_shard:
            self._close_shard()

    def _close_shard(self) -> None:
        if self._output is None:
            return
        self._output.write(encode_index(self._index))
        self.files[f"{self._name}/c/{self._shards}"] = self._output.close()
        self._output = None
        self._index[:] = ABSENT
        self._chunks = 0
        self._shards += 1
