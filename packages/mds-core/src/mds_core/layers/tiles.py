"""Exact attention tile by tile: no tensor of all queries times all keys ever exists.

Softmax is merged from tile to tile by its maximum and sum (Milakov and Gimelshein 2018); the
backward pass computes each tile's weights again from the logarithm of that sum.

Shapes: ``b`` micro batch, ``s`` sequence, ``n`` query heads and ``g`` key/value heads of this rank,
``d`` head dim, ``q`` and ``k`` positions of queries and keys in a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mds_core.rng import DropoutKey, Site, dropout, keep_mask

__all__ = ["Dropping", "Merge", "Tiles", "Visibility", "add_gradients", "tiles_of"]


def tiles_of(ranges: Sequence[range], *, size: int | None) -> Iterator[tuple[slice, range]]:
    """Cut positions into tiles: each one's place in the local tensor, and its global positions.

    >>> list(tiles_of([range(0, 3), range(9, 12)], size=2))[1:3]
    [(slice(2, 3, None), range(2, 3)), (slice(3, 5, None), range(9, 11))]
    """
    begin = 0
    for positions in ranges:
        step = size or len(positions)
        for first in range(0, len(positions), step):
            tile = positions[first : first + step]
            yield slice(begin + first, begin + first + len(tile)), tile
        begin += len(positions)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Visibility:
    """Which earlier positions a position sees, and what is added to the scores.

    Attributes:
        window: How many positions, itself included; all if None.
        documents: [b, s] number of each token's document; others are invisible.
        slopes: ALiBi's, of the n heads; empty without.
    """

    window: int | None = None
    documents: Tensor | None = None
    slopes: tuple[float, ...] = ()

    def sees_nothing(self, rows: range, columns: range) -> bool:
        """Whether no position of ``rows`` sees one of ``columns``."""
        later = columns.start > rows[-1]
        return later or (self.window is not None and columns[-1] <= rows.start - self.window)

    def mask(self, rows: range, columns: range, *, like: Tensor) -> Tensor | None:
        """What is added to the scores [b, n, q, k] of a tile, broadcast; None for nothing."""
        device = like.device
        row = torch.arange(rows.start, rows.stop, device=device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=device)[None]
        oldest = rows[-1] - self.window if self.window is not None else -1
        if self.documents is None and columns[-1] <= rows.start and columns.start > oldest:
            visible = None
        else:
            visible = (column <= row)[None, None]
            if self.window is not None:
                visible = visible & (column > row - self.window)
            if self.documents is not None:
                own = self.documents[:, None, rows.start : rows.stop, None]
                others = self.documents[:, None, None, columns.start : columns.stop]
                visible = visible & (own == others)
        bias: Tensor | None = None
        if self.slopes:
            slope = torch.tensor(self.slopes, dtype=like.dtype, device=device)
            bias = slope[None, :, None, None] * (column - row)
        if visible is None:
            return bias
        zero = like.new_zeros(1) if bias is None else bias
        return torch.where(visible, zero, -math.inf)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Dropping:
    """Dropout of attention weights: where in the model, and how much."""

    key: DropoutKey
    layer: int
    site: Site
    heads: range
    probability: float

    def keep(self, rows: range, columns: range) -> Tensor:
        """Which weights [b, n, q, k] of a tile stay."""
        return keep_mask(
            self.key,
            layer=self.layer,
            site=self.site,
            probability=self.probability,
            heads=self.heads,
            rows=rows,
            columns=columns,
        )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Tiles:
    """How one rank's attention is cut.

    Attributes:
        places: Of every rank that shares the sequence, the positions that it holds.
        own: Which of them this rank is.
        size: Most positions in a tile; each stretch of positions at once if None.
        visibility: Who sees whom.
        dropping: Dropout of the weights; None without.
    """

    places: tuple[tuple[range, ...], ...]
    own: int
    size: int | None
    visibility: Visibility
    dropping: Dropping | None = None

    def pairs(self, place: int) -> Iterator[tuple[slice, range, slice, range]]:
        """Tiles of own queries and of ``place``'s keys that see each other."""
        columns = list(tiles_of(self.places[place], size=self.size))
        for rows_at, rows in tiles_of(self.places[self.own], size=self.size):
            for columns_at, seen in columns:
                if not self.visibility.sees_nothing(rows, seen):
                    yield rows_at, rows, columns_at, seen

    def scores(self, query: Tensor, key: Tensor, rows: range, columns: range) -> Tensor:
        """Scores [b, n, q, k] of a tile, -inf where a key is not seen, in fp32 at least."""
        b, n, q, d = query.shape
        grouped = query.reshape(b, key.size(1), -1, q, d)
        scores = (grouped @ key[:, :, None].mT).view(b, n, q, -1)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / math.sqrt(d)
        mask = self.visibility.mask(rows, columns, like=scores)
        return scores if mask is None else scores + mask

    def dropped(self, weights: Tensor, rows: range, columns: range) -> Tensor:
        """Weights, or their gradients, [b, n, q, k] of a tile after dropout."""
        if self.dropping is None:
            return weights
        keep = self.dropping.keep(rows, columns)
        return dropout(weights, keep, probability=self.dropping.probability)


class Merge:
    """The softmax of queries [b, n, s, d] as it grows with every tile of keys."""

    def __init__(self, query: Tensor, tiles: Tiles) -> None:
        precision = torch.promote_types(query.dtype, torch.float32)
        self.query, self.tiles = query, tiles
        self.total = torch.zeros_like(query, dtype=precision)
        self.largest = self.total.new_full((*query.shape[:3], 1), -math.inf)
        self.sum = torch.zeros_like(self.largest)

    def add(self, place: int, key: Tensor, value: Tensor) -> None:
        """Take in the keys and values [b, g, s, d] of one place."""
        for rows_at, rows, columns_at, columns in self.tiles.pairs(place):
            self._add(rows_at, rows, key[:, :, columns_at], value[:, :, columns_at], columns)

    def _add(self, at: slice, rows: range, key: Tensor, value: Tensor, columns: range) -> None:
        scores = self.tiles.scores(self.query[:, :, at], key, rows, columns)
        before = self.largest[:, :, at]
        largest = torch.maximum(before, scores.amax(-1, keepdim=True))
        # Where nothing has been seen yet, the maximum is -inf, and -inf minus itself no number.
        shift = largest.masked_fill(largest == -math.inf, 0.0)
        weights, shrink = (scores - shift).exp(), (before - shift).exp()
        self.sum[:, :, at] = self.sum[:, :, at] * shrink + weights.sum(-1, keepdim=True)
        part = _by_group(self.tiles.dropped(weights, rows, columns).to(value.dtype), value)
        self.total[:, :, at] = self.total[:, :, at] * shrink + part
        self.largest[:, :, at] = largest

    def result(self) -> tuple[Tensor, Tensor]:
        """Attended values [b, n, s, d], and each query's log of the sum [b, n, s, 1]."""
        attended = (self.total / self.sum).to(self.query.dtype)
        return attended, self.largest + self.sum.log()


def add_gradients(
    tiles: Tiles,
    place: int,
    *,
    query: Tensor,
    pair: Tensor,
    log_sum: Tensor,
    gradient: Tensor,
    share: Tensor,
    query_gradient: Tensor,
    pair_gradient: Tensor,
) -> None:
    """Add what one place's keys and values give to the gradients.

    Args:
        tiles: The cut.
        place: Whose keys and values these are.
        query: [b, n, s, d].
        pair: [2, b, g, s, d] keys and values.
        log_sum: [b, n, s, 1] from `Merge.result`.
        gradient: [b, n, s, d] of the attended values.
        share: [b, n, s, 1] sum over d of ``gradient`` times the attended values.
        query_gradient: [b, n, s, d], added to.
        pair_gradient: [2, b, g, s, d], added to.
    """
    scale = 1.0 / math.sqrt(query.size(-1))
    for at, rows, columns_at, columns in tiles.pairs(place):
        key, value = pair[0, :, :, columns_at], pair[1, :, :, columns_at]
        own, dy = query[:, :, at], gradient[:, :, at]
        weights = (tiles.scores(own, key, rows, columns) - log_sum[:, :, at]).exp()
        kept = tiles.dropped(weights, rows, columns).to(dy.dtype)
        pair_gradient[1, :, :, columns_at] += _over_group(kept, dy, heads=key.size(1))
        d_weights = tiles.dropped(_by_group(dy, value.mT).to(weights.dtype), rows, columns)
        d_scores = (weights * (d_weights - share[:, :, at]) * scale).to(own.dtype)
        query_gradient[:, :, at] += _by_group(d_scores, key)
        pair_gradient[0, :, :, columns_at] += _over_group(d_scores, own, heads=key.size(1))


def _by_group(left: Tensor, right: Tensor) -> Tensor:
    """[b, n, q, i] times [b, g, i, j], each group of heads with its own: [b, n, q, j]."""
    b, n, q, i = left.shape
    return (left.reshape(b, right.size(1), -1, q, i) @ right[:, :, None]).reshape(b, n, q, -1)


def _over_group(left: Tensor, right: Tensor, *, heads: int) -> Tensor:
    """Transposed [b, n, q, i] times [b, n, q, j], summed over each group's heads: [b, g, i, j]."""
    b, n, q, i = left.shape
    rows = left.reshape(b, heads, n // heads * q, i)
    return rows.mT @ right.reshape(b, heads, n // heads * q, -1)
