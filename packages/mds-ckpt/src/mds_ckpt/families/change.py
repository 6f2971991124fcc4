"""How one canonical tensor and its Hugging Face counterparts turn into each other. Pure functions.

Each change is a bijection: ``to_canonical(*to_hf(x))`` is ``x``, bit for bit. Letters: g key/value
heads (groups), r query heads a group, d head dim, h hidden, f MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


_TILE_ROWS = 256
"""Rows that are transposed at a time, so that what is read and written stays in the cache."""
_TILE_PADDING = 16
"""Elements between a tile's rows, which would else meet in few places of the cache."""
_BLOCK_BYTES = 2 << 20
"""Bytes of a transpose that are made at a time."""


class Change(Protocol):
    """One canonical array against one or more of Hugging Face's."""

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """The counterparts of a canonical array."""
        ...

    def to_canonical(self, *arrays: Array) -> Array:
        """The canonical array that counterparts make."""
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """Stored alike."""

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """The array itself."""
        return (array,)

    def to_canonical(self, *arrays: Array) -> Array:
        """The array itself."""
        return arrays[0]


def _transposed(array: Array) -> Array:
    """A matrix [rows, columns] as [columns, rows]; six times as fast as numpy's own copy."""
    result = np.empty(array.shape[::-1], array.dtype)
    step = _block_step(array)
    for first in range(0, array.shape[1], step):
        _transpose(array[:, first : first + step], result[first : first + step])
    return result


def _transposed_blocks(array: Array) -> Iterator[Array]:
    """A matrix's transpose in order, some rows of it at a time."""
    step = _block_step(array)
    for first in range(0, array.shape[1], step):
        columns = array[:, first : first + step]
        block = np.empty(columns.shape[::-1], array.dtype)
        _transpose(columns, block)
        yield block


def _block_step(array: Array) -> int:
    """Columns that are transposed at a time."""
    column: int = array.shape[0] * array.dtype.itemsize
    return max(1, _BLOCK_BYTES // max(1, column))


def _transpose(source: Array, target: Array) -> None:
    """Fill ``target`` [columns, rows] from ``source`` [rows, columns], tile by tile."""
    rows, columns = source.shape
    # Plain integers: numpy lets other threads run while it copies those.
    plain = f"u{source.dtype.itemsize}"
    source, target = source.view(plain), target.view(plain)
    buffer = np.empty((min(rows, _TILE_ROWS), columns + _TILE_PADDING), plain)[:, :columns]
    for first in range(0, rows, _TILE_ROWS):
        tile = buffer[: rows - first]
        tile[:] = source[first : first + _TILE_ROWS]
        target[:, first : first + _TILE_ROWS] = tile.T


@dataclass(frozen=True, slots=True)
class Transposed:
    """GPT-2's Conv1D stores [in, out] where a linear layer stores [out, in].

    ``inner`` is how the linear layer's rows lie otherwise.
    """

    inner: Change = field(default_factory=Same)

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """[out, in] to [in, out]."""
        return (_transposed(self._matrix(array)),)

    def blocks(self, array: Array) -> Iterator[Array]:
        """[out, in] to [in, out], some rows of it at a time."""
        return _transposed_blocks(self._matrix(array))

    def to_canonical(self, *arrays: Array) -> Array:
        """[in, out] to [out, in]."""
        return self.inner.to_canonical(_transposed(arrays[0]))

    def _matrix(self, array: Array) -> Array:
        (matrix,) = self.inner.to_hf(array)
        return matrix


@dataclass(frozen=True, slots=True)
class Stacked:
    """Two tensors one above the other: ``[gate; up]`` of a gated MLP."""

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """[2 f, h] to the gate's and the up projection's [f, h]."""
        half = array.shape[0] // 2
        return array[:half], array[half:]

    def to_canonical(self, *arrays: Array) -> Array:
        """The gate's and the up projection's [f, h] to [2 f, h]."""
        return np.concatenate(arrays)


@dataclass(frozen=True, slots=True)
class Grouped:
    """Rows of query, key and value grouped by key/value head, against three tensors."""

    groups: int
    queries: int
    """Query heads of one group."""
    channels: int

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """[g (r + 2) d, ...] to [g r d, ...], [g d, ...], [g d, ...]."""
        rest = array.shape[1:]
        parts = array.reshape(self.groups, self.queries + 2, self.channels, *rest)
        query, key, value = np.split(parts, [self.queries, self.queries + 1], axis=1)
        return tuple(part.reshape(-1, *rest) for part in (query, key, value))

    def to_canonical(self, *arrays: Array) -> Array:
        """[g r d, ...], [g d, ...], [g d, ...] to [g (r + 2) d, ...]."""
        rest = arrays[0].shape[1:]
        heads = [array.reshape(self.groups, -1, self.channels, *rest) for array in arrays]
        return np.concatenate(heads, axis=1).reshape(-1, *rest)


@dataclass(frozen=True, slots=True)
class Thirds:
    """Grouped rows against one tensor: all query rows, all key rows, all value rows."""

    grouped: Grouped

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """[g (r + 2) d, ...] to [q; k; v]."""
        groups, queries, channels = self.grouped.groups, self.grouped.queries, self.grouped.channels
        parts = array.reshape(groups, queries + 2, channels, *array.shape[1:])
        result = np.empty(array.shape, array.dtype)
        start = 0
        for heads in (slice(queries), slice(queries, queries + 1), slice(queries + 1, None)):
            third = parts[:, heads]
            rows = result[start : start + third.shape[0] * third.shape[1] * channels]
            rows.reshape(third.shape)[:] = third
            start += len(rows)
        return (result,)

    def to_canonical(self, *arrays: Array) -> Array:
        """The inverse."""
        rows = self.grouped.groups * self.grouped.channels
        cuts = [self.grouped.queries * rows, (self.grouped.queries + 1) * rows]
        return self.grouped.to_canonical(*np.split(arrays[0], cuts))


@dataclass(frozen=True, slots=True)
class Paired:
    """Query and key rows whose rotating pairs stand side by side, against ours in halves.

    Meta's Llama and its descendants rotate channels 0 and 1, 2 and 3, ...; ours, as transformers,
    0 and d / 2, 1 and d / 2 + 1, ...; ``inner`` is how query, key and value lie otherwise.
    """

    inner: Grouped

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """[g (r + 2) d, ...] to query, key and value, the first two with pairs side by side."""
        query, key, value = self.inner.to_hf(array)
        half = self.inner.channels // 2
        return self._swapped(query, half), self._swapped(key, half), value

    def to_canonical(self, *arrays: Array) -> Array:
        """The inverse."""
        query, key, value = arrays
        return self.inner.to_canonical(self._swapped(query, 2), self._swapped(key, 2), value)

    def _swapped(self, array: Array, inner: int) -> Array:
        """Rows of each head as [d / inner, inner], transposed."""
        outer = self.inner.channels // inner
        parts = array.reshape(-1, outer, inner, *array.shape[1:])
        return parts.swapaxes(1, 2).reshape(array.shape)


@dataclass(frozen=True, slots=True)
class Fused:
    """One tensor that holds what ``inner`` has as several, one above the other."""

    inner: Grouped | Paired

    def to_hf(self, array: Array) -> tuple[Array, ...]:
        """The parts, one above the other."""
        return (np.concatenate(self.inner.to_hf(array)),)

    def to_canonical(self, *arrays: Array) -> Array:
        """The inverse."""
        grouped = self.inner.inner if isinstance(self.inner, Paired) else self.inner
        rows = grouped.groups * grouped.channels
        cuts = [grouped.queries * rows, (grouped.queries + 1) * rows]
        return self.inner.to_canonical(*np.split(arrays[0], cuts))
