"""An opened checkpoint: canonical names, shapes and numbers, whatever format they were read from.

Readers in ``formats/`` build these objects; nothing here knows a file format. A tensor's data is
read when it is asked for, only as much of it as is asked for, and never kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from mds_ckpt.errors import RejectedError, UsageError
from mds_ckpt.escape import printable
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_ckpt.tensors.box import (
    Box,
    Range,
    extents,
    intersect,
    relative,
    row_blocks,
    size,
    split_flat,
    whole,
)
from mds_ckpt.tensors.dtype import ITEM_SIZES, numpy_dtype

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]


BLOCK_BYTES = 1 << 20
"""What is read at a time where a tensor is passed on: small enough to stay in the cache."""


class LazyTensor(ABC):
    """A tensor of a checkpoint that is read when asked for.

    Args:
        name: Canonical name of the parameter.
        shape: Global shape, with the true vocabulary.
        dtype: Number type by safetensors' name, such as ``"BF16"``.
    """

    def __init__(self, name: str, shape: Sequence[int], dtype: str) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return size(whole(self.shape)) * ITEM_SIZES[self.dtype]

    def numpy(self) -> Array:
        """The whole tensor."""
        return self.read_box(whole(self.shape))

    def read(self, box: Box | None = None, flat: Range | None = None) -> Array:
        """Part of the tensor; only what it takes is read from the files.

        Args:
            box: A half-open range for each dimension; None for the whole tensor.
            flat: Only elements ``[start, stop)`` of the box, in row-major order.

        Returns:
            An array with the extents of ``box``; 1-D if ``flat`` is given.
        """
        import numpy as np

        box = whole(self.shape) if box is None else tuple((int(a), int(b)) for a, b in box)
        self._check_box(box)
        if flat is None:
            return self.read_box(box)
        if not 0 <= flat[0] <= flat[1] <= size(box):
            raise UsageError(f"flat range {list(flat)} lies outside box {box} of '{self.name}'")
        parts = [self.read_box(part).reshape(-1) for part in split_flat(box, *flat)]
        return np.concatenate([np.empty(0, numpy_dtype(self.dtype)), *parts])

    def _check_box(self, box: Box) -> None:
        inside = len(box) == len(self.shape) and all(
            0 <= start <= stop <= extent
            for (start, stop), extent in zip(box, self.shape, strict=True)
        )
        if not inside:
            raise UsageError(f"box {box} lies outside '{self.name}' of shape {list(self.shape)}")

    @property
    def is_sliceable(self) -> bool:
        """Whether a part takes only a part of the work, so that reading in blocks is no waste."""
        return True

    def blocks(self, box: Box | None = None) -> Iterator[Array]:
        """The elements of ``box`` (or all) in row-major order, a few MiB at a time."""
        box = whole(self.shape) if box is None else box
        yield from (self.read_box(part) for part in self.block_boxes(box))

    def block_boxes(self, box: Box) -> Iterator[Box]:
        """The boxes whose elements are the blocks of ``box``."""
        if self.is_sliceable:
            yield from row_blocks(box, BLOCK_BYTES // ITEM_SIZES[self.dtype])
        else:
            yield box

    def column_boxes(self) -> list[Box]:
        """A matrix cut between columns where reading the parts takes no more than the whole."""
        return [whole(self.shape)]

    @abstractmethod
    def read_box(self, box: Box) -> Array:
        """The elements of ``box``, which lies inside the tensor, in the extents of ``box``."""

    def __repr__(self) -> str:
        return f"<LazyTensor {printable(self.name)} {self.dtype} {list(self.shape)}>"


class Source(Protocol):
    """Stored elements of one piece, in row-major order."""

    def read(self, start: int, stop: int) -> Array:
        """Elements ``[start, stop)`` as a 1-D array."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A box of a tensor, or the flat range of one, and where its elements are."""

    box: Box
    flat: Range | None
    source: Source


class PiecedTensor(LazyTensor):
    """A tensor that lies in pieces, which cover it exactly once (the reader has checked that).

    Args:
        name: Canonical name.
        shape: Global shape.
        dtype: Number type of all pieces.
        pieces: Boxes and flat ranges with their sources.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: str, *, pieces: Sequence[StoredPiece]
    ) -> None:
        super().__init__(name, shape, dtype)
        self._parts: list[tuple[Box, int, Source]] = []
        for piece in pieces:
            if piece.flat is None:
                self._parts.append((piece.box, 0, piece.source))
                continue
            offset = 0
            for part in split_flat(piece.box, *piece.flat):
                self._parts.append((part, offset, piece.source))
                offset += size(part)

    def column_boxes(self) -> list[Box]:
        """Cut where ranks were, if each has whole columns."""
        boxes = sorted({part for part, _, _ in self._parts})
        rows = (0, self.shape[0])
        return boxes if all(box[0] == rows for box in boxes) else super().column_boxes()

    def read_box(self, box: Box) -> Array:
        """The elements of ``box``, put together from the pieces that it touches."""
        import numpy as np

        touched = [
            (part, offset, source, common)
            for part, offset, source in self._parts
            if (common := intersect(part, box)) is not None
        ]
        if len(touched) == 1 and touched[0][3] == box:
            part, offset, source, common = touched[0]
            return _read_common(part, offset, source, common)
        result = np.empty(extents(box), numpy_dtype(self.dtype))
        for part, offset, source, common in touched:
            result[relative(common, box)] = _read_common(part, offset, source, common)
        return result


def _read_common(part: Box, offset: int, source: Source, common: Box) -> Array:
    """``common`` out of ``part``, whose elements begin at ``offset`` of the source.

    Whole rows of the first dimension are read, from the first needed to the last.
    """
    if not part:
        return source.read(offset, offset + 1).reshape(())
    row = size(part[1:])
    first, last = common[0][0] - part[0][0], common[0][1] - part[0][0]
    data = source.read(offset + first * row, offset + last * row)
    rows: Box = (common[0], *part[1:])
    return data.reshape(extents(rows))[relative(common, rows)]


class ComputedTensor(LazyTensor):
    """A tensor made from others by a function, such as fused query, key and value rows.

    Args:
        name: Canonical name.
        shape: Shape of the result.
        dtype: Number type of the result.
        compute: Makes the whole tensor; called at each read.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: str, *, compute: Callable[[], Array]
    ) -> None:
        super().__init__(name, shape, dtype)
        self._compute = compute

    @property
    def is_sliceable(self) -> bool:
        """No: every part takes the work of the whole."""
        return False

    def read_box(self, box: Box) -> Array:
        """The elements of ``box``; the whole tensor is computed for it."""
        result = self._compute()
        if result.shape != self.shape:
            raise ValueError(
                f"'{self.name}' was computed with shape {list(result.shape)} where "
                f"{list(self.shape)} was promised"
            )
        return result[relative(box, whole(self.shape))]


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened checkpoint of any format.

    Tensors carry canonical names (Megatron-core's), global shapes and the true vocabulary.
    """

    path: Path
    """The folder or file that was opened."""
    format: str
    """Word of the format, as in ``--from`` and ``--to``."""
    model: ModelRecord
    """Family, configuration by mds-core's field names, vocabulary, tied embeddings."""
    states: Mapping[str, Mapping[str, LazyTensor]]
    """Tensors by state (``weight``, ``master``, ``exp_avg`` ...), then by canonical name."""
    step: int | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Degrees of the run that wrote it (tp, pp, dp ...); information only."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """``optimizer``, ``schedule``, ``rng``, ``data`` and ``config`` as mds manifests name them."""
    companions: Mapping[str, Path] = field(default_factory=dict)
    """Small files that travel along: ``tokenizer.json``, ``generation_config.json`` ..."""
    sealed: Mapping[str, RegularFile] = field(default_factory=dict)
    """All files of an encrypted checkpoint by their plain names; empty for others."""
    origin: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the source format that its own writer may want back, such as HF's config.json."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """Records of the source's files that a writer of the same kind may store as they are."""
    notes: tuple[str, ...] = ()
    """What the reader dropped, guessed from evidence or found odd; sentences for the user."""
    manifest: CheckpointManifest | None = None
    """The manifest, for checkpoints in our own format."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's configuration, by mds-core's field names."""
        return self.model.config

    @property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """The weights by canonical name."""
        return MappingProxyType(dict(self.states.get("weight", {})))

    def tensor(self, name: str, state: str = "weight") -> LazyTensor:
        """One tensor; RejectedError if the checkpoint has no such state or parameter."""
        found = self.states.get(state, {}).get(name)
        if found is None:
            raise RejectedError(
                self.path,
                f"it holds no state '{printable(state)}' of this parameter",
                remedy="`mds-ckpt inspect` lists what it holds",
                tensor=name,
            )
        return found
