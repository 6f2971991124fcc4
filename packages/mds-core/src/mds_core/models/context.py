"""What all layers of a decoder's forward pass share: rotations, masks, dropout, tiles.

Shapes: ``b`` micro batch, ``s`` sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mds_core.config import Execution, GPTConfig
from mds_core.layers.alibi import alibi_mask, alibi_slopes
from mds_core.layers.attention import Context, attention_mask
from mds_core.layers.cache import KVCache, SlotRows
from mds_core.layers.head_shares import HeadShares
from mds_core.layers.lora import AdapterDropout
from mds_core.layers.rope import Rotation, rotation
from mds_core.layers.tiles import Tiles, Visibility
from mds_core.models.sequence import SequenceShare
from mds_core.rng import DropoutKey

__all__ = ["ContextMaker", "Sequences", "document_numbers", "numbered"]


class Sequences(NamedTuple):
    """What a forward pass says of its micro batch."""

    position_ids: Tensor
    """[b or 1, s] int64."""
    dropout: DropoutKey | None
    """Key of the masks; None when nothing is dropped or drawn."""
    documents: Tensor | None
    """[b, s] number of each token's document; None if all is one."""
    cache: KVCache | SlotRows | None
    """Earlier tokens' keys and values."""
    adapters: AdapterDropout | None
    """Dropout of low-rank adapters."""


class ContextMaker(NamedTuple):
    """Makes the context of each forward pass of one model."""

    config: GPTConfig
    execution: Execution
    share: SequenceShare
    dtype: torch.dtype

    def of(self, sequences: Sequences) -> Context:
        """The context of one forward pass."""
        config, (position_ids, _, documents, cache, _) = self.config, sequences
        turn, length = None, position_ids.size(1)
        if config.position_embedding == "rope":
            turn = rotation(position_ids, config=config, dtype=self.dtype)
        if self.execution.tiled and cache is None:
            return self._tiled(sequences, turn)
        offset, device = 0 if cache is None else cache.length, position_ids.device
        places = position_ids if isinstance(cache, SlotRows) and cache.ragged else None
        mask = attention_mask(
            length,
            offset=offset,
            window=config.sliding_window,
            documents=documents,
            places=places,
            device=device,
        )
        if config.position_embedding == "alibi":
            mask = alibi_mask(
                length,
                slopes=self._slopes(),
                visible=mask,
                offset=offset,
                places=places,
                dtype=torch.promote_types(self.dtype, torch.float32),
                device=device,
            )
        return Context(
            rotation=turn,
            mask=mask,
            dropout=sequences.dropout,
            cache=cache,
            rows=self.share.rows(length),
            adapters=sequences.adapters,
        )

    def _tiled(self, sequences: Sequences, turn: Rotation | None) -> Context:
        """Without a mask of all positions times all positions."""
        config, length = self.config, sequences.position_ids.size(1)
        places, own = self.share.places(length), self.share.groups.ulysses_rank
        if self.execution.sequence_sharing == "ulysses":
            places, own = ((range(length),),), 0  # inside attention all positions are here
        elif turn is not None:
            kept = torch.cat([torch.arange(r.start, r.stop) for r in places[own]])
            kept = kept.to(turn[0].device)
            turn = (turn[0][:, :, kept], turn[1][:, :, kept])
        slopes = self._slopes() if config.position_embedding == "alibi" else ()
        visibility = Visibility(
            window=config.sliding_window, documents=sequences.documents, slopes=slopes
        )
        return Context(
            rotation=turn,
            mask=None,
            dropout=sequences.dropout,
            cache=None,
            rows=self.share.rows(length),
            adapters=sequences.adapters,
            tiles=Tiles(
                places=places, own=own, size=self.execution.sequence_chunk, visibility=visibility
            ),
        )

    def _slopes(self) -> tuple[float, ...]:
        """ALiBi's slopes of this rank's heads."""
        groups, heads = self.share.groups, self.config.num_attention_heads
        ring = self.execution.sequence_sharing == "ring"  # then each rank has all heads
        size, place = (1, 0) if ring else (groups.ulysses_size, groups.ulysses_rank)
        shares = HeadShares.of(self.config, tp_size=groups.tp_size, ulysses_size=size)
        own = heads // groups.tp_size
        slopes = alibi_slopes(heads)[groups.tp_rank * own : (groups.tp_rank + 1) * own]
        slopes += (0.0,) * (shares.heads * size - own)  # of empty heads
        return slopes[place * shares.heads : (place + 1) * shares.heads]


def numbered(
    tokens: Tensor, position_ids: Tensor | None, cumulative_lengths: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Positions and documents of tokens [b, s]: from 0 on, and all one, where none are given."""
    if position_ids is None:
        position_ids = torch.arange(tokens.size(1), device=tokens.device)[None]
    if cumulative_lengths is None:
        return position_ids, None
    return position_ids, document_numbers(cumulative_lengths, tokens=tokens)


def document_numbers(cumulative_lengths: Tensor, *, tokens: Tensor) -> Tensor:
    """Number of the document that each token belongs to.

    Args:
        cumulative_lengths: [documents + 1] bounds in the flattened batch.
        tokens: [b, s].

    Returns:
        [b, s] int64.
    """
    place = torch.arange(tokens.numel(), device=tokens.device)
    bounds = cumulative_lengths.to(device=tokens.device, dtype=torch.int64)
    return torch.searchsorted(bounds, place, right=True).view_as(tokens)
