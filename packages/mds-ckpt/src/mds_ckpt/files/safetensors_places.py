"""Safetensors files whose tensors are written at their places: in any order, by several threads.

For files whose digest nothing records; that takes the bytes from the first to the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from mds_ckpt.files.file_operations import REAL, FileOperations
from mds_ckpt.files.safetensors_file import little_endian_bytes
from mds_ckpt.files.safetensors_header import TensorSpec, header_bytes
from mds_ckpt.files.writeback import Writeback
from mds_ckpt.tensors.dtype import ITEM_SIZES, dtype_name

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PlacedSafetensors"]

_CHUNK = 8 << 20


class PlacedSafetensors:
    """A new file of declared tensors; every element is written once, whoever comes first.

    Args:
        path: A file that does not exist yet.
        specs: The tensors. Put wide number types first: then every tensor is aligned.
        metadata: Strings for the header.
        operations: The disk.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec],
        *,
        metadata: Mapping[str, str] | None = None,
        operations: FileOperations = REAL,
    ) -> None:
        header = header_bytes(specs, metadata=metadata)
        self._specs = {spec.name: spec for spec in specs}
        self._missing = {spec.name: math.prod(spec.shape) for spec in specs}
        self._places: dict[str, int] = {}
        size = len(header)
        for spec in specs:
            self._places[spec.name] = size
            size += spec.nbytes
        self._operations = operations
        self._lock = Lock()
        self._file = operations.create_sized(path, size)
        try:
            operations.write_at(self._file, memoryview(header), 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, arrays: Iterable[np.ndarray[Any, Any]], *, start: int = 0) -> None:
        """Write consecutive elements of a tensor in row-major order.

        Args:
            name: The tensor.
            arrays: Elements of the declared type, in arrays of any shape.
            start: Where the first of them stands in the flattened tensor.
        """
        spec, place = self._specs[name], self._places[name]
        offset = place + start * ITEM_SIZES[spec.dtype]
        writeback = Writeback(self._file, start=offset)
        for array in arrays:
            if dtype_name(array.dtype) != spec.dtype or offset + array.nbytes > place + spec.nbytes:
                raise ValueError(
                    f"tensor '{name}' was declared as {spec.dtype} {list(spec.shape)} and "
                    f"{array.dtype} {list(array.shape)} was given"
                )
            data = little_endian_bytes(array)
            for first in range(0, data.size, _CHUNK):
                part = data[first : first + _CHUNK]
                self._operations.write_at(self._file, part.data, offset)
                offset += part.size
                writeback.wrote(part.size)
            with self._lock:
                self._missing[name] -= array.size
        writeback.complete()

    def close(self) -> None:
        """Force the file to the disk; ValueError if a tensor was not written exactly once."""
        with self._file:
            for name, missing in self._missing.items():
                if missing:
                    raise ValueError(f"tensor '{name}' lacks {missing} elements")
            self._operations.sync(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
