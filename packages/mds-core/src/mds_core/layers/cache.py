"""Keys and values of the tokens seen so far, so that generation computes each only once.

`KVCache` holds a batch of equally long sequences; in a `SlotCache` sequences of any lengths come
and go while others are generated.

Shapes: ``b`` batch, ``g`` key/value heads of this rank, ``s`` new tokens, ``d`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache", "SlotCache", "SlotRows"]


class KVCache:
    """Growing keys and values of every layer of one batch.

    Args:
        batch_size: Sequences that are generated together.
        max_length: Most tokens of a sequence, prompt included.
        kv_heads: Key/value heads of this rank.
        channels: Channels of a head.
        dtype: Of the keys and values.
        device: Of the keys and values.

    Attributes:
        length: Tokens held so far.
    """

    def __init__(
        self,
        batch_size: int,
        *,
        max_length: int,
        kv_heads: int,
        channels: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.length = 0
        self.max_length = max_length
        self._shape = (2, batch_size, kv_heads, max_length, channels)
        self._dtype, self._device = dtype, device
        self._layers: dict[int, Tensor] = {}

    def positions(self, count: int) -> Tensor:
        """Positions [1, s] of the next ``count`` tokens."""
        return torch.arange(self.length, self.length + count, device=self._device)[None]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens.

        Args:
            layer: Number of the layer.
            keys: [b, g, s, d].
            values: [b, g, s, d].

        Returns:
            Keys and values [b, g, length + s, d].
        """
        stop = self.length + keys.size(2)
        if stop > self.max_length:
            raise ValueError(
                f"the cache holds {self.max_length} tokens and {stop} are wanted; make it with a "
                f"larger max_length or generate fewer tokens."
            )
        if layer not in self._layers:
            self._layers[layer] = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        stored = self._layers[layer]
        stored[0, :, :, self.length : stop] = keys
        stored[1, :, :, self.length : stop] = values
        return stored[0, :, :, :stop], stored[1, :, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` tokens as held, once every layer has appended them."""
        self.length += count

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue what row ``rows[i]`` was (beam search).

        Args:
            rows: [b] int64.
        """
        for layer, stored in self._layers.items():
            self._layers[layer] = stored[:, rows]


class SlotCache:
    """Keys and values of sequences of different lengths, each in a slot of its own.

    It takes memory for the longest sequence so far, not for ``max_length``.

    Args:
        slots: Most sequences at a time.
        max_length: Most tokens of a sequence, prompt included.
        kv_heads: Key/value heads of this rank.
        channels: Channels of a head.
        dtype: Of the keys and values.
        device: Of the keys and values.

    Attributes:
        lengths: Tokens that each slot holds.
    """

    def __init__(
        self,
        slots: int,
        *,
        max_length: int,
        kv_heads: int,
        channels: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.lengths = [0] * slots
        self.max_length = max_length
        self.device = device
        self._shape = (2, slots, kv_heads, 0, channels)
        self._dtype = dtype
        self._layers: dict[int, Tensor] = {}

    def rows(self, first: int, count: int) -> SlotRows:
        """The slots from ``first`` on as the cache of a forward pass over ``count`` sequences."""
        return SlotRows(self, range(first, first + count))

    def layer(self, number: int, *, length: int) -> Tensor:
        """What a layer stores, [2, slots, g, at least ``length``, d]."""
        if number not in self._layers:
            self._layers[number] = torch.zeros(self._shape, dtype=self._dtype, device=self.device)
        stored = self._layers[number]
        held = stored.size(3)
        if held >= length:
            return stored
        # Doubled, so that a sequence of n tokens is moved log(n) times and not n times.
        more = min(max(2 * held, length, 64), self.max_length) - held
        fresh = stored.new_zeros((*self._shape[:3], more, self._shape[4]))
        self._layers[number] = torch.cat([stored, fresh], dim=3)
        return self._layers[number]

    def clear(self, slot: int) -> None:
        """Make a slot free for another sequence."""
        self.lengths[slot] = 0

    def copy(self, source: int, target: int) -> None:
        """Let slot ``target`` continue what ``source`` holds."""
        length = self.lengths[source]
        for stored in self._layers.values():
            stored[:, target, :, :length] = stored[:, source, :, :length]
        self.lengths[target] = length


class SlotRows:
    """Neighbouring slots of a `SlotCache`, as one forward pass sees them.

    Args:
        cache: Where the slots are.
        slots: The slots; row i of the batch continues the sequence in ``slots[i]``.

    Attributes:
        length: Tokens of the longest sequence.
        ragged: Whether the sequences have different lengths.
    """

    def __init__(self, cache: SlotCache, slots: range) -> None:
        lengths = cache.lengths[slots.start : slots.stop]
        self.length = max(lengths)
        self.ragged = min(lengths) < self.length
        self._cache, self._slots = cache, slots
        self._starts = torch.tensor(lengths, device=cache.device)[:, None]

    def positions(self, count: int) -> Tensor:
        """Positions [b, s] of the next ``count`` tokens of each sequence."""
        return self._starts + torch.arange(count, device=self._cache.device)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens' keys and values; return those of all tokens.

        Args:
            layer: Number of the layer.
            keys: [b, g, s, d].
            values: [b, g, s, d].

        Returns:
            Keys and values [b, g, length + s, d]. Of a shorter sequence those behind its new tokens
            mean nothing; `attention_mask` hides them, given the positions.
        """
        count = keys.size(2)
        stop = self.length + count
        if stop > self._cache.max_length:
            raise ValueError(
                f"the cache holds {self._cache.max_length} tokens and {stop} are wanted; make it "
                f"with a larger max_length or generate fewer tokens."
            )
        stored = self._cache.layer(layer, length=stop)[:, self._slots.start : self._slots.stop]
        if self.ragged:
            row = torch.arange(len(self._slots), device=self._cache.device)[:, None]
            places = self.positions(count)
            stored[0][row, :, places] = keys.transpose(1, 2)
            stored[1][row, :, places] = values.transpose(1, 2)
        else:
            stored[0, :, :, self.length : stop] = keys
            stored[1, :, :, self.length : stop] = values
        return stored[0, :, :, :stop], stored[1, :, :, :stop]

    def advance(self, count: int) -> None:
        """Count ``count`` tokens of each sequence as held."""
        for slot in self._slots:
            self._cache.lengths[slot] += count
