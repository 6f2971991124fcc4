"""Put the ranks' fragments together: one lazy tensor for each parameter and state.

Readers of rank-wise formats add what they find; here it becomes whole tensors, or a sentence that
says what is missing. No data is read until a tensor is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import LazyTensor, PiecedTensor, StoredPiece
from mds_ckpt.errors import RejectedError
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.reshard import ModelFacts, Shard, pieces, shard_of
from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import TensorRef
from mds_ckpt.read_options import Replicated
from mds_ckpt.tensors.box import Box, coverage_fault
from mds_ckpt.tensors.dtype import numpy_dtype

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array, Source

__all__ = [
    "Assembly",
    "CastTensor",
    "Fragment",
    "MissingTensor",
    "ReplicatedTensor",
    "TorchSource",
    "summed",
]


@dataclass(frozen=True, slots=True)
class TorchSource:
    """Elements of a tensor in a torch file, counted from ``offset`` of its flattened form."""

    file: TorchFile
    tensor: TensorRef
    offset: int = 0

    def read(self, start: int, stop: int) -> Array:
        """Elements ``[start, stop)`` as a 1-D array."""
        first, last = self.offset + start, self.offset + stop
        return self.file.read(self.tensor, start=first, stop=last).reshape(-1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fragment:
    """Elements ``[start, stop)`` of one rank's flattened local tensor."""

    tp_rank: int
    local_shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str
    source: Source
    tp_size: int | None = None
    """Ranks that hold the parameter; None for the model's tensor-parallel size."""
    copy: int = 0
    """Number of the copy, where pipeline stages hold copies of a tied parameter."""


class ReplicatedTensor(LazyTensor):
    """A parameter that several ranks hold; the copies are compared when they are read.

    Args:
        copies: The same tensor from each rank.
        mode: What to do with copies that differ.
        path: The checkpoint, for messages.
    """

    def __init__(self, copies: Sequence[LazyTensor], *, mode: Replicated, path: Path) -> None:
        first = copies[0]
        super().__init__(first.name, first.shape, first.dtype)
        self._copies = copies
        self._mode = mode
        self._path = path

    @property
    def is_sliceable(self) -> bool:
        """As the copies are."""
        return all(copy.is_sliceable for copy in self._copies)

    def read_box(self, box: Box) -> Array:
        """The elements of ``box``; RejectedError if the copies must be equal and are not."""
        first = self._copies[0].read_box(box)
        if self._mode == "first":
            return first
        if self._mode == "average":
            return self._average(first, box)
        for rank, copy in enumerate(self._copies[1:], start=1):
            other = copy.read_box(box)
            if not _are_equal(first, other):
                raise self._differs(rank, first, other)
        return first

    def summed(self) -> LazyTensor:
        """The sum of the copies, for a parameter of which each rank adds its own."""
        return _SummedTensor(self.name, self._copies)

    def _average(self, first: Array, box: Box) -> Array:
        mean: Array = (_total(self._copies, box) / len(self._copies)).astype(first.dtype)
        return mean

    def _differs(self, rank: int, first: Array, other: Array) -> RejectedError:
        import numpy as np

        difference = np.max(np.abs(first.astype("f8") - other.astype("f8")))
        return RejectedError(
            self._path,
            f"copies 0 and {rank} of {len(self._copies)} differ by up to {difference:.3g}",
            remedy="say which counts with --replicated first, or --replicated average",
            tensor=self.name,
        )


class _SummedTensor(LazyTensor):
    """Copies of one parameter, added up when they are read."""

    def __init__(self, name: str, copies: Sequence[LazyTensor]) -> None:
        super().__init__(name, copies[0].shape, copies[0].dtype)
        self._copies = copies

    @property
    def is_sliceable(self) -> bool:
        """As the copies are."""
        return all(copy.is_sliceable for copy in self._copies)

    def read_box(self, box: Box) -> Array:
        """The sum over ``box``, rounded once."""
        total: Array = _total(self._copies, box).astype(numpy_dtype(self.dtype))
        return total


def _total(copies: Sequence[LazyTensor], box: Box) -> Array:
    total = copies[0].read_box(box).astype("f8")
    for copy in copies[1:]:
        total += copy.read_box(box)
    return total


def summed(tensor: LazyTensor) -> LazyTensor:
    """The sum of the copies that ranks hold of a parameter; a lone tensor as it is."""
    if isinstance(tensor, CastTensor):
        return CastTensor(summed(tensor.inner), tensor.dtype)
    return tensor.summed() if isinstance(tensor, ReplicatedTensor) else tensor


def _are_equal(first: Array, second: Array) -> bool:
    """Whether two arrays of one shape and type hold the same bytes."""
    import numpy as np

    # Eight bytes at a time where they divide: comparing is then no work beside reading.
    word = np.uint64 if first.nbytes % 8 == 0 else np.uint8
    ours, theirs = (np.ascontiguousarray(array).reshape(-1).view(word) for array in (first, second))
    return bool(np.array_equal(ours, theirs))


class CastTensor(LazyTensor):
    """A tensor in another number type, cast when it is read."""

    def __init__(self, inner: LazyTensor, dtype: str) -> None:
        super().__init__(inner.name, inner.shape, dtype)
        self.inner = inner

    @property
    def is_sliceable(self) -> bool:
        """As the other one is."""
        return self.inner.is_sliceable

    def read_box(self, box: Box) -> Array:
        """The elements of ``box``, rounded to nearest even."""
        return self.inner.read_box(box).astype(numpy_dtype(self.dtype))


class MissingTensor(LazyTensor):
    """A tensor of which parts are missing; reading it says which."""

    def __init__(
        self, name: str, shape: Sequence[int], dtype: str, *, error: RejectedError
    ) -> None:
        super().__init__(name, shape, dtype)
        self.error = error

    def read_box(self, box: Box) -> Array:
        """Never returns."""
        raise self.error


class Assembly:
    """Collects fragments of parameters and makes tensors of them.

    Args:
        path: The checkpoint, for messages.
        facts: The model, for the arithmetic of shards.
        replicated: What to do with copies that differ.
    """

    def __init__(self, path: Path, facts: ModelFacts, *, replicated: Replicated = "assert") -> None:
        self._path = path
        self._facts = facts
        self._replicated = replicated
        self._found: dict[str, dict[str, list[tuple[Named, Fragment]]]] = {}
        self.incomplete: str | None = None
        """Why optimizer states may be incomplete, such as a missing shard; None if they may not."""

    def add(self, named: Named, state: str, fragment: Fragment) -> None:
        """Add what one file holds of one state of one parameter."""
        parts = self._found.setdefault(state, {}).setdefault(named.name, [])
        parts.append((named, fragment))

    def states(self) -> dict[str, dict[str, LazyTensor]]:
        """The tensors by state and canonical name, in the order of the model.

        Raises:
            RejectedError: A weight is incomplete or does not fit the model.
        """
        return {
            state: {
                name: self._tensor(state, name, found[name])
                for name in sorted(found, key=model_order)
            }
            for state, found in self._found.items()
        }

    def _tensor(self, state: str, name: str, parts: Sequence[tuple[Named, Fragment]]) -> LazyTensor:
        copies: dict[tuple[int, int], list[tuple[Shard, Fragment]]] = {}
        for named, fragment in parts:
            is_whole = named.sharing == "replicated"
            key = (fragment.copy, fragment.tp_rank if is_whole else 0)
            copies.setdefault(key, []).append((self._shard(named, fragment), fragment))
        tensors = [self._copy(state, name, copy) for copy in copies.values()]
        for tensor in tensors:
            if isinstance(tensor, MissingTensor):
                return tensor
        if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
            raise self._refused(name, "its copies differ in shape or type", "copy it again")
        if len(tensors) == 1:
            return tensors[0]
        return ReplicatedTensor(tensors, mode=self._replicated, path=self._path)

    def _shard(self, named: Named, fragment: Fragment) -> Shard:
        try:
            facts = self._facts
            if fragment.tp_size is not None:
                facts = replace(facts, tp_size=fragment.tp_size)
            return shard_of(named, fragment.local_shape, fragment.tp_rank, facts)
        except (ValueError, IndexError) as error:
            remedy = "check the stored arguments against the tensors"
            raise self._refused(named.name, str(error), remedy) from None

    def _copy(self, state: str, name: str, parts: Sequence[tuple[Shard, Fragment]]) -> LazyTensor:
        shape, dtype = parts[0][0].shape, parts[0][1].dtype
        if any(shard.shape != shape or part.dtype != dtype for shard, part in parts):
            shapes = sorted({str(list(part.local_shape)) for _, part in parts})
            reason = f"its ranks' shapes or types do not fit together: {', '.join(shapes)}"
            raise self._refused(name, reason, "check that all files are of one checkpoint")
        stored = [piece for shard, part in parts for piece in _stored_pieces(shard, part)]
        fault = coverage_fault(shape, [(piece.box, piece.flat) for piece in stored])
        if fault is None:
            return PiecedTensor(name, shape, dtype, pieces=stored)
        known = self.incomplete if state != "weight" else None
        error = self._refused(
            name if state == "weight" else f"{name} ({state})",
            known or f"its ranks do not hold it exactly once: {fault}",
            _remedy(state, fault),
        )
        if state == "weight":
            raise error
        return MissingTensor(name, shape, dtype, error=error)

    def _refused(self, name: str, reason: str, remedy: str) -> RejectedError:
        return RejectedError(self._path, reason, remedy=remedy, tensor=name)


def _remedy(state: str, fault: str) -> str:
    """What to do where ranks do not hold a tensor exactly once."""
    if fault.endswith("overlap"):
        return "files of two saves may lie in one folder; move those of the older one elsewhere"
    copy = "copy the files that are missing"
    return copy if state == "weight" else f"{copy}, or convert with --weights-only"


def _stored_pieces(shard: Shard, part: Fragment) -> list[StoredPiece]:
    return [
        StoredPiece(piece.box, piece.flat, _Shifted(part.source, piece.offset))
        for piece in pieces(shard, part.start, part.stop)
    ]


@dataclass(frozen=True, slots=True)
class _Shifted:
    source: Source
    offset: int

    def read(self, start: int, stop: int) -> Array:
        return self.source.read(self.offset + start, self.offset + stop)


_LAYER = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")
_PLACES: Mapping[str, int] = {"embedding": 0, "encoder": 1, "decoder": 2}


def model_order(name: str) -> tuple[int, int]:
    """A sort key: embedding, blocks by number, what follows; stable within these."""
    layer = _LAYER.match(name)
    if layer is not None:
        return _PLACES[layer[1]], int(layer[2])
    return _PLACES.get(name.partition(".")[0], 3), 1 << 30


Resolve = Callable[[str], Named | None]
"""From a stored name to the canonical one; None for a parameter that is to be left out."""
