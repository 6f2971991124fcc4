"""The parts of whole tensors that the ranks of a target layout hold, made when they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.reshard import ModelFacts, Shard, shard_of
from mds_ckpt.plan import Loss, Options, cast
from mds_ckpt.tensors.box import size, split_flat
from mds_ckpt.tensors.dtype import ITEM_SIZES, numpy_dtype
from mds_ckpt.tensors.qkv import Heads, Layout

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

__all__ = [
    "LocalTensor",
    "TargetLayout",
    "layout_of",
    "local_shard",
    "target_facts",
    "true_vocabulary",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """Degrees of parallelism of a checkpoint that is to be written."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    """Data-parallel ranks among which experts are shared out."""
    vp_size: int = 1
    """Model chunks of each pipeline stage."""
    zero_stage: int = 1
    is_pipeline: bool | None = None
    """Whether DeepSpeed's files are a pipeline's; None takes a pipeline wherever one can be."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage; None divides them evenly, with one more on the first stages."""
    divisible_by: int | None = None
    """Pad the vocabulary to a multiple of this times tp; None takes the model's."""

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dp_size", "ep_size", "vp_size"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise UsageError(f"{name} is {getattr(self, name)}; give a number from 1 on")
        if self.dp_size % self.ep_size:
            raise UsageError(
                f"--ep {self.ep_size} shares experts out among --dp {self.dp_size} ranks, which it "
                f"does not divide; give a --dp that is a multiple of it"
            )
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.pp_size:
            raise UsageError(
                f"--layers-per-stage names {len(self.layers_per_stage)} stages and --pp says "
                f"{self.pp_size}; give one number for each stage"
            )
        if self.layers_per_stage is not None and self.vp_size > 1:
            raise UsageError("--vp divides layers evenly; leave --layers-per-stage or --vp away")


def layout_of(options: Options) -> TargetLayout:
    """The layout that the user asked for."""
    return TargetLayout(
        tp_size=options.tp_size,
        pp_size=options.pp_size,
        dp_size=options.dp_size,
        ep_size=options.ep_size,
        vp_size=options.vp_size,
        zero_stage=1 if options.zero_stage is None else options.zero_stage,
        is_pipeline=options.pipeline,
        layers_per_stage=options.layers_per_stage,
        divisible_by=options.divisible_by,
    )


def true_vocabulary(checkpoint: Checkpoint, vocab_size: int | None) -> int:
    """The words that are kept: as asked, or all that the checkpoint holds."""
    rows = checkpoint.model.padded_vocab_size or checkpoint.model.vocab_size
    if vocab_size is not None and not 1 <= vocab_size <= rows:
        raise UsageError(
            f"the vocabulary was given as {vocab_size} and the embedding has {rows} rows; give "
            f"--vocab-size from 1 to {rows}"
        )
    return vocab_size or rows


def padded_vocabulary(checkpoint: Checkpoint, layout: TargetLayout, words: int) -> int:
    """Rows of the embedding: the next multiple that every tensor-parallel rank divides."""
    multiple = layout.divisible_by or checkpoint.config.get("make_vocab_size_divisible_by") or 128
    step = multiple * layout.tp_size
    return -(-words // step) * step


def target_facts(
    checkpoint: Checkpoint, layout: TargetLayout, *, words: int, qkv: Layout
) -> ModelFacts:
    """The model as the arithmetic of shards needs it."""
    config = checkpoint.config
    heads = config.get("num_attention_heads")
    if not heads:
        raise UnsupportedError(
            checkpoint.path,
            "its configuration does not say how many attention heads it has",
            remedy="convert it to hf or mds, which do not need them",
        )
    channels = config.get("head_dim") or config["hidden_size"] // heads
    groups = config.get("num_key_value_heads") or heads
    return ModelFacts(
        heads=Heads(heads, groups, channels),
        layout=qkv,
        is_gated="glu" in str(config.get("activation", "gelu")),
        vocab_size=words,
        tp_size=layout.tp_size,
    )


def local_shard(
    checkpoint: Checkpoint,
    named: Named,
    tensor: LazyTensor,
    rank: int,
    facts: ModelFacts,
    rows: int,
) -> Shard:
    """Rank ``rank``'s part of a whole tensor.

    Args:
        checkpoint: The source, for messages.
        named: Canonical name and how ranks share the parameter.
        tensor: The whole tensor.
        rank: Tensor-parallel rank.
        facts: The model.
        rows: Rows of the padded vocabulary.
    """
    shape = list(tensor.shape)
    if named.sharing == "vocab":
        shape[0] = rows
    dim = {"replicated": None, "row": 1}.get(named.sharing, 0)
    if dim is not None:
        parts = facts.tp_size * (2 if named.sharing == "gated" and facts.is_gated else 1)
        if shape[dim] % parts:
            raise _cannot_share(checkpoint, named, shape, facts.tp_size)
        shape[dim] //= facts.tp_size
    try:
        return shard_of(named, shape, rank, facts)
    except ValueError as error:
        raise UnsupportedError(
            checkpoint.path, str(error), remedy="choose another --tp", tensor=named.name
        ) from None


def _cannot_share(
    checkpoint: Checkpoint, named: Named, shape: Sequence[int], tp_size: int
) -> UnsupportedError:
    return UnsupportedError(
        checkpoint.path,
        f"its shape {list(shape)} can't be divided among {tp_size} tensor-parallel ranks",
        remedy="choose another --tp",
        tensor=named.name,
    )


class LocalTensor:
    """One rank's part of a tensor; read, cast and padded with zeros when it is asked for."""

    def __init__(
        self, tensor: LazyTensor, shard: Shard, dtype: str, losses: list[Loss] | None = None
    ) -> None:
        self._tensor = tensor
        self._shard = shard
        self._losses = losses if losses is not None else []
        self.name = dtype
        self.shape = shard.local_shape

    def cut_rows(self, rows: int) -> LocalTensor:
        """The same without the padding rows behind the first ``rows``."""
        local = (rows, *self.shape[1:])
        shard = Shard(self._shard.shape, local, self._shard.dim, self._shard.ranges)
        return LocalTensor(self._tensor, shard, self.name, self._losses)

    def emptied(self) -> LocalTensor:
        """A tensor of this type with no elements, as stage 3 keeps in a weight's place."""
        return LocalTensor(self._tensor, Shard((0,), (0,), None), self.name, self._losses)

    @property
    def dtype(self) -> Any:
        """Numpy element type."""
        return numpy_dtype(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        count = ITEM_SIZES[self.name]
        for extent in self.shape:
            count *= extent
        return count

    def blocks(self) -> Iterator[Array]:
        """The values in order, a few MiB at a time."""
        yield from self.span(0, math.prod(self.shape))

    def span(self, start: int, stop: int) -> Iterator[Array]:
        """Elements ``[start, stop)`` of the flattened values, likewise; no others are read."""
        import numpy as np

        at = start
        for first, box in self._shard.boxes():
            low, high = max(start, first), min(stop, first + size(box))
            if low >= high:
                continue
            if low > at:
                yield np.zeros(low - at, self.dtype)
            if self._tensor.is_sliceable:
                parts = split_flat(box, low - first, high - first)
                read = itertools.chain.from_iterable(map(self._tensor.blocks, parts))
                yield from map(self._cast, read)
            else:  # each part would take the work of the whole
                whole_box = self._tensor.read_box(box).reshape(-1)
                yield self._cast(whole_box[low - first : high - first])
            at = high
        if at < stop:
            yield np.zeros(stop - at, self.dtype)

    def _cast(self, part: Array) -> Array:
        losses: list[Loss] = []
        result = cast(part, self.name, name=self._tensor.name, losses=losses).reshape(-1)
        self._losses.extend(losses)
        return result

    def numpy(self) -> Array:
        """The values."""
        import numpy as np

        flat, at = np.empty(math.prod(self.shape), self.dtype), 0
        for block in self.blocks():
            flat[at : at + block.size] = block
            at += block.size
        return flat.reshape(self.shape)
