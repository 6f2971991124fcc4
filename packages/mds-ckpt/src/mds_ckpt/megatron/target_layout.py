"""The parts of whole tensors that the ranks of a target layout hold, made when they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import UnsupportedError, UsageError
from mds_ckpt.megatron.naming import Named
from mds_ckpt.megatron.reshard import ModelFacts, Shard, shard_of
from mds_ckpt.plan import Loss, cast
from mds_ckpt.tensors.box import size
from mds_ckpt.tensors.dtype import ITEM_SIZES, numpy_dtype
from mds_ckpt.tensors.qkv import Heads, Layout

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

__all__ = ["LocalTensor", "TargetLayout", "local_shard", "target_facts", "true_vocabulary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetLayout:
    """Degrees of parallelism of a checkpoint that is to be written."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    divisible_by: int | None = None
    """Pad the vocabulary to a multiple of this times tp; None takes the model's."""

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dp_size"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise UsageError(f"{name} is {getattr(self, name)}; give a number from 1 on")


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

    def numpy(self) -> Array:
        """The values."""
        import numpy as np

        losses: list[Loss] = []
        local = np.zeros(self.shape, self.dtype)
        flat = local.reshape(-1)
        for start, box in self._shard.boxes():
            if not size(box):
                continue
            part = self._tensor.read_box(box)
            name = self._tensor.name
            values = cast(part, self.name, name=name, losses=losses).reshape(-1)
            flat[start : start + size(box)] = values
        self._losses.extend(losses)
        return local
