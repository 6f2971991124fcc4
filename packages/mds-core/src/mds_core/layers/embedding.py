"""Tables of token and position vectors; the vocabulary is split over tensor-parallel ranks.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``t`` tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import copy, reduce, reduce_scatter
from mds_core.groups import group_rank, group_size
from mds_core.parameter import Declaration, ParallelModule

__all__ = [
    "PositionEmbedding",
    "VocabParallelBias",
    "VocabParallelEmbedding",
    "VocabParallelHead",
]


def declare_vocabulary(
    vocab_size: int, hidden_size: int, *, padded_size: int, tp: ProcessGroup | None, std: float
) -> Declaration:
    """Declare the rows of a ``[v, h]`` table that this rank holds, padding after the true ones."""
    rows = padded_size // group_size(tp)
    start = min(group_rank(tp) * rows, vocab_size)
    stop = min(group_rank(tp) * rows + rows, vocab_size)
    return Declaration(
        global_shape=(vocab_size, hidden_size),
        dim=0,
        ranges=((start, stop),) if stop > start else (),
        padding=rows - (stop - start),
        std=std,
    )


class VocabParallelEmbedding(ParallelModule):
    """Look up token vectors; each rank holds a range of the vocabulary.

    Args:
        vocab_size: The true vocabulary.
        hidden_size: Width of a vector.
        padded_size: Rows over all ranks, a multiple of their number; rows past the vocabulary are
            zero and never looked up.
        tp: Ranks that share the table; None for one.
        std: Standard deviation of the first values.
        sequence_parallel: The output keeps this rank's positions only.
        dtype: Of the table.
        device: Of the table.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_size: int | None = None,
        tp: ProcessGroup | None = None,
        std: float = 0.02,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = group_size(tp)
        padded = padded_size or -(-vocab_size // size) * size
        if padded % size or padded < vocab_size:
            raise ValueError(
                f"padded_size ({padded}) must be a multiple of the {size} tensor-parallel ranks "
                f"and at least vocab_size ({vocab_size})."
            )
        self.vocab_size = vocab_size
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.start = group_rank(tp) * (padded // size)
        """First token id of this rank's rows."""
        declaration = declare_vocabulary(
            vocab_size, hidden_size, padded_size=padded, tp=tp, std=std
        )
        self.weight = self.declare("weight", declaration, dtype=dtype, device=device)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the tokens' vectors.

        Args:
            tokens: [b, s] int64 ids.

        Returns:
            [b, s, h], or [b, s / t, h] with sequence parallelism.
        """
        check_tokens(tokens, vocab_size=self.vocab_size)
        if self.tp is None:
            return F.embedding(tokens, self.weight)
        local = tokens - self.start
        foreign = (local < 0) | (local >= self.weight.size(0))
        vectors = F.embedding(local.masked_fill(foreign, 0), self.weight)
        vectors = vectors.masked_fill(foreign.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter(vectors, group=self.tp, dim=1)
        return reduce(vectors, group=self.tp)


class PositionEmbedding(ParallelModule):
    """A learned vector for each position.

    Args:
        count: Positions.
        hidden_size: Width of a vector.
        std: Standard deviation of the first values.
        partial_over: Ranks that each look up their own positions.
        dtype: Of the table.
        device: Of the table.
    """

    def __init__(
        self,
        count: int,
        hidden_size: int,
        *,
        std: float,
        partial_over: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.partial_over = partial_over
        declaration = Declaration(global_shape=(count, hidden_size), std=std)
        self.weight = self.declare("weight", declaration, dtype=dtype, device=device)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return [b or 1, s, h] for position_ids [b or 1, s]."""
        return F.embedding(position_ids, copy(self.weight, group=self.partial_over))


class VocabParallelHead(ParallelModule):
    """The weight [v / t, h] of an untied output layer; its product is part of the loss.

    Args:
        vocab_size: The true vocabulary.
        hidden_size: Width of a hidden state.
        padded_size: Rows over all ranks, a multiple of their number.
        tp: Ranks that share the head; None for one.
        std: Standard deviation of the first values.
        dtype: Of the weight.
        device: Of the weight.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        padded_size: int,
        tp: ProcessGroup | None = None,
        std: float = 0.02,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.start = group_rank(tp) * (padded_size // group_size(tp))
        """First token id of this rank's rows."""
        declaration = declare_vocabulary(
            vocab_size, hidden_size, padded_size=padded_size, tp=tp, std=std
        )
        self.weight = self.declare("weight", declaration, dtype=dtype, device=device)


class VocabParallelBias(ParallelModule):
    """The bias [v / t] of an output layer whose weight is the table of token vectors.

    Args:
        vocab_size: The true vocabulary.
        padded_size: Rows over all ranks, a multiple of their number.
        tp: Ranks that share the vocabulary; None for one.
        dtype: Of the bias.
        device: Of the bias.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        padded_size: int,
        tp: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        table = declare_vocabulary(vocab_size, 1, padded_size=padded_size, tp=tp, std=0.0)
        zeros = replace(table, global_shape=(vocab_size,), std=None)
        self.bias = self.declare("bias", zeros, dtype=dtype, device=device)


def check_tokens(tokens: Tensor, *, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary; a padding row would silently answer for them."""
    if tokens.is_meta or not tokens.numel():
        return
    low, high = tokens.aminmax()
    if tokens.device.type != "cpu" or torch.compiler.is_compiling():
        inside = (low >= 0) & (high < vocab_size)
        torch._assert_async(inside, "a token id is outside the vocabulary")
        return
    if int(low) < 0 or int(high) >= vocab_size:
        raise ValueError(
            f"token ids run from {int(low)} to {int(high)} but the vocabulary has the ids 0 to "
            f"{vocab_size - 1}. Use the tokenizer that the model was built for, or raise "
            f"vocab_size."
        )


def check_positions(count: int, *, limit: int) -> None:
    """Refuse more positions than there are vectors."""
    if count > limit:
        raise ValueError(
            f"position {count - 1} has no vector: max_position_embeddings is {limit}. Shorten the "
            f"sequence or build the model with more positions."
        )
