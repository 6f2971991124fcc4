"""Self-attention with grouped key/value heads, split by heads over the ranks.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``n`` query heads and ``g`` key/value heads
of this rank, ``d`` head dim, ``q`` and ``k`` positions of queries and keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import exchange
from mds_core.config import Execution, GPTConfig
from mds_core.groups import group_rank, group_size
from mds_core.init import scaled_std
from mds_core.layers.cache import KVCache, SlotRows
from mds_core.layers.few_heads import query_key_value_rows, sharers, whole_heads
from mds_core.layers.head_shares import HeadShares
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from mds_core.layers.lora import AdapterDropout
from mds_core.layers.norm import Norm
from mds_core.layers.ring import ring_attention
from mds_core.layers.rope import Rotation, apply_rope
from mds_core.layers.tiles import Dropping, Tiles
from mds_core.memory import again
from mds_core.rng import DropoutKey, Site, dropout, keep_mask

__all__ = [
    "AttentionCore",
    "Context",
    "Memory",
    "SelfAttention",
    "attention_mask",
    "fused_attention",
    "math_attention",
]


class Memory(NamedTuple):
    """What a decoder's layers attend to."""

    hidden: Tensor
    """[b, k, h] of the encoder, this rank's positions with sequence parallelism."""
    mask: Tensor
    """[b, 1, q, k] bool, which of them a position of the decoder sees."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Context:
    """What all layers of one forward pass share.

    Attributes:
        rotation: Cosines and sines of the positions; None without rotary embedding.
        mask: Which keys a query sees, [b or 1, 1, q, k] bool, or what is added to their scores,
            [b or 1, n, q, k]; None for plain causal attention.
        dropout: Key of this micro batch's masks; None when nothing is dropped.
        cache: Keys and values of earlier tokens; None in training.
        rows: Stretches of the sequence that this rank's residual stream holds, in its order.
        memory: The encoder's output; None without an encoder.
        tiles: How self-attention is cut into tiles; None for all at once.
        adapters: Dropout of low-rank adapters; None where they drop nothing.
    """

    rotation: Rotation | None
    mask: Tensor | None
    dropout: DropoutKey | None
    cache: KVCache | SlotRows | None
    rows: tuple[range, ...]
    memory: Memory | None = None
    tiles: Tiles | None = None
    adapters: AdapterDropout | None = None


def attention_mask(
    queries: int,
    *,
    offset: int = 0,
    window: int | None = None,
    documents: Tensor | None = None,
    places: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Say which keys each query sees; None where plain causal attention says it all.

    Args:
        queries: Number of query positions; keys are the ``offset`` positions before them and they.
        offset: Keys that a cache already holds.
        window: How many positions a query sees, itself included; all if None.
        documents: [b, s] number of the document of each token; others' tokens are invisible.
        places: [b, q] positions of the queries where the sequences' lengths differ.
        device: Of the result.

    Returns:
        [b or 1, 1, q, k] bool, or None.
    """
    keys = queries + offset
    plain = documents is None and (window is None or window >= keys)
    if places is None and plain and (offset == 0 or queries == 1):
        return None
    if places is None:
        places = torch.arange(offset, keys, device=device)[None]
    row = places[:, None, :, None]
    column = torch.arange(keys, device=device)
    visible = column <= row
    if window is not None:
        visible = visible & (column > row - window)
    if documents is not None:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None, :])
    return visible


def fused_attention(query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> Tensor:
    """Attend with the fastest kernel that torch has for the device; nothing can be dropped.

    Args:
        query: [b, n, q, d].
        key: [b, g, k, d], n a multiple of g.
        value: [b, g, k, d].
        mask: [b or 1, 1, q, k] bool, True where a key is seen, or [b or 1, n, q, k] added to the
            scores; None for causal attention.

    Returns:
        [b, n, q, d].
    """
    # A single query after a cache sees every key; for it "causal" would mean the first key only.
    causal = mask is None and query.size(2) > 1
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)  # autocast may have made the queries narrower
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=query.size(1) != key.size(1)
    )


def math_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    keep: Tensor | None = None,
    probability: float = 0.0,
) -> Tensor:
    """Attend in plain steps, with dropout on the attention weights.

    Args:
        query: [b, n, q, d].
        key: [b, g, k, d], n a multiple of g.
        value: [b, g, k, d].
        mask: [b or 1, 1, q, k] bool, True where a key is seen, or [b or 1, n, q, k] added to the
            scores; None for causal attention.
        keep: [b, n, q, k] bool, the weights that stay; all if None.
        probability: Share of weights that ``keep`` drops.

    Returns:
        [b, n, q, d].
    """
    b, n, q, d = query.shape
    g, k = key.shape[1:3]
    if mask is None:
        mask = torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)[None, None]
    grouped = query.reshape(b, g, n // g, q, d)
    scores = grouped @ key[:, :, None].mT / math.sqrt(d)  # [b, g, n / g, q, k]
    precision = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.view(b, n, q, k)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    else:
        scores = scores.to(precision) + mask
    weights = scores.softmax(dim=-1, dtype=precision).to(value.dtype)
    if keep is not None:
        weights = dropout(weights, keep, probability=probability)
    return (weights.view(b, g, n // g, q, k) @ value[:, :, None]).reshape(b, n, q, d)


class AttentionCore(nn.Module):
    """What stands between the projections: scores, weights, weighted values. No parameters.

    Args:
        config: Shape of the model.
        layer: Number that keys this layer's dropout.
        site: Place in the layer, for dropout.
        heads: Global numbers of this rank's query heads.
        execution: How to compute.
        ring: Ranks that hold other positions of the same sequences; None for one.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        layer: int,
        site: Site,
        heads: range,
        execution: Execution,
        ring: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        execution.check(config)
        self.layer, self.site, self.heads, self.ring = layer, site, heads, ring
        self.probability = config.attention_dropout
        self.fused = execution.attention_kernel == "fused" or (
            execution.attention_kernel == "auto" and config.attention_dropout == 0.0
        )
        self.computed_again = execution.computes_again("core_attention")

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, context: Context, *, mask: Tensor | None
    ) -> Tensor:
        """Attend, and join the heads.

        Args:
            query: [b, n, q, d].
            key: [b, g, k, d].
            value: [b, g, k, d].
            context: Of the forward pass; its dropout counts.
            mask: As for `fused_attention`.

        Returns:
            [b, q, n d].
        """
        attended = again(self._attend, query, key, value, context, mask, active=self.computed_again)
        return attended.transpose(1, 2).flatten(2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, context: Context, mask: Tensor | None
    ) -> Tensor:
        if context.tiles is not None and self.site == "attention":
            tiles = replace(context.tiles, dropping=self._dropping(context))
            return ring_attention(query, key, value, tiles, group=self.ring)
        if self.fused:
            return fused_attention(query, key, value, mask=mask)
        keep = None
        if context.dropout is not None and self.probability > 0.0:
            keep = keep_mask(
                context.dropout,
                layer=self.layer,
                site=self.site,
                probability=self.probability,
                heads=self.heads,
                rows=range(query.size(2)),
                columns=range(key.size(2)),
            )
        return math_attention(query, key, value, mask=mask, keep=keep, probability=self.probability)

    def _dropping(self, context: Context) -> Dropping | None:
        if context.dropout is None or self.probability == 0.0:
            return None
        return Dropping(
            key=context.dropout,
            layer=self.layer,
            site=self.site,
            heads=self.heads,
            probability=self.probability,
        )


class SelfAttention(nn.Module):
    """Project to queries, keys and values, attend, project back.

    The projection's rows are grouped by key/value head: its query heads, then key, then value.

    Args:
        config: Shape of the model.
        layer: Global number of the layer, which keys its dropout and its place in a cache.
        tp: Ranks that share the heads; None for one.
        ulysses: Ranks that share each sequence; None for one. Outside attention each holds its
            positions of all heads, inside all positions of its share of the heads
            (DeepSpeed-Ulysses); as a ring each keeps its positions, and keys and values go round.
        execution: How to compute; with sequence parallelism inputs and outputs hold this rank's
            positions only.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        layer: int,
        tp: ProcessGroup | None = None,
        ulysses: ProcessGroup | None = None,
        execution: Execution | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        self.layer = layer
        ring = ulysses if execution.sequence_sharing == "ring" else None
        ulysses = ulysses if ring is None else None
        self.ulysses = ulysses
        self.tp, self.sharers = tp, sharers(config, tp)
        self.shares = HeadShares.of(
            config, tp_size=group_size(tp), ulysses_size=group_size(ulysses)
        )
        heads = self.shares.heads
        first = config.num_attention_heads // group_size(tp) * group_rank(tp)
        first += heads * group_rank(ulysses)
        self.core = AttentionCore(
            config,
            layer=layer,
            site="attention",
            heads=range(first, first + heads),
            execution=execution,
            ring=ring,
        )
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size,
            (config.num_attention_heads + 2 * config.kv_heads) * config.channels,
            tp=tp,
            bias=config.qkv_bias,
            std=config.init_std,
            rows=query_key_value_rows(config, tp) if self.sharers > 1 else None,
            sequence_parallel=execution.sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.channels,
            config.hidden_size,
            tp=tp,
            bias=config.add_bias,
            std=scaled_std(config.init_std, num_layers=config.num_layers),
            sequence_parallel=execution.sequence_parallel,
            dtype=dtype,
            device=device,
        )
        self.q_layernorm, self.k_layernorm = (
            _head_norm(config, tp=tp, dtype=dtype, device=device) if config.qk_norm else None
            for _ in range(2)
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        return self.attend(self.linear_qkv(x, context.adapters), context)

    def attend(self, qkv: Tensor, context: Context) -> Tensor:
        """Go on from the projection [b, s, (n + 2 g) d] to [b, s, h].

        A sequence that ranks share is whole only between the two exchanges.
        """
        qkv = self.shares.dealt(self._whole(qkv))
        qkv = exchange(qkv, group=self.ulysses, split=2, join=1)
        query, key, value = self._heads(qkv)
        if context.rotation is not None:
            query, key = apply_rope(query, *context.rotation), apply_rope(key, *context.rotation)
        if context.cache is not None:
            key, value = context.cache.append(self.layer, key, value)
        joined = self.core(query, key, value, context, mask=context.mask)
        own = exchange(joined, group=self.ulysses, split=1, join=2)
        return self.linear_proj(self.shares.kept(own), context.adapters)  # type: ignore[no-any-return]

    def _whole(self, qkv: Tensor) -> Tensor:
        """Join the parts of a key/value head that this rank shares with others."""
        if self.tp is None or self.sharers == 1:
            return qkv
        own = self.shares.per_group * self.shares.channels
        pair = whole_heads(qkv[..., own:], tp=self.tp, ranks=self.sharers)
        return torch.cat([qkv[..., :own], pair], dim=-1)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take [b, s, g (n / g + 2) d] apart into [b, n, s, d] and twice [b, g, s, d]."""
        shares, per_group = self.shares, self.shares.queries_per_group
        grouped = qkv.view(*qkv.shape[:2], shares.kv_heads, per_group + 2, shares.channels)
        # One split, so that the backward pass writes the three gradients into one tensor at once.
        parts = torch.split(grouped, [per_group, 1, 1], dim=3)
        query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value


def _head_norm(
    config: GPTConfig,
    *,
    tp: ProcessGroup | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Norm:
    """Of the queries or the keys; each rank normalises its heads, so its gradient is partial."""
    return Norm(
        config.channels,
        kind=config.normalization,
        epsilon=config.norm_epsilon,
        zero_centered=config.zero_centered_norm,
        partial_over=tp,
        dtype=dtype,
        device=device,
    )
