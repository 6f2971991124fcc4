"""Keys and values of the tokens seen so far, so that generation computes each only once.

Shapes: ``b`` batch, ``g`` key/value heads of this rank, ``s`` new tokens, ``d`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache"]


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
