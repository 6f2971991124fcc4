"""GPT: a decoder-only transformer of GPT-2, NeoX, BLOOM, Llama, Mistral, Mixtral or Qwen kind.

What is notable here:

- parameter names are the canonical ones of the checkpoint format (Megatron-core's);
- every rank computes its slice of the start values, equal for any layout;
- the loss never holds the logits as a whole, and padded vocabulary rows take no part in it;
- dropout masks are a function of sample and position, so recomputation and layouts change nothing.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``v`` vocabulary, ``t`` tensor-parallel
size, ``u`` ulysses size. The residual stream holds ``s / u`` positions of a sequence that ulysses
ranks share, and a ``t``-th of them with sequence parallelism.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mds_core.collectives import copy, gather, gather_partial, reduce
from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.layers.attention import Context
from mds_core.layers.cache import KVCache, SlotCache, SlotRows
from mds_core.layers.embedding import (
    VocabParallelEmbedding,
    VocabParallelHead,
    check_positions,
)
from mds_core.layers.lora import AdapterDropout
from mds_core.models.block import Build, Stack, active_key
from mds_core.models.context import ContextMaker, Sequences, numbered
from mds_core.models.embedding import Embedding
from mds_core.models.losses import GPTLoss, RoutedLoss
from mds_core.models.sequence import SequenceShare
from mds_core.models.staged import check_divided, headless
from mds_core.parameter import initialize, parameter_shards
from mds_core.partition import Stage
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard
from mds_kernels import linear_cross_entropy

__all__ = ["GPT", "GPTLoss", "RoutedLoss"]


class _CacheOptions(TypedDict):
    """What every cache of a model is made with."""

    max_length: int
    kv_heads: int
    channels: int
    dtype: torch.dtype
    device: torch.device


class GPT(nn.Module):
    """A decoder-only transformer on this rank's share of a layout.

    Every rank is given whole samples and computes its part of them. Ranks along ``dp`` and
    ``ulysses`` hold equal parameters, whose gradients are to be summed over ``groups.dp_ulysses``;
    those of `expert_parameters` over ``groups.expert_dp_ulysses``.

    Args:
        config: Shape of the model.
        groups: The ranks that share it.
        seed: From which the start values follow, together with the parameters' names.
        dtype: Of the parameters.
        device: Of the parameters; on ``"meta"`` nothing is allocated or initialised.
        execution: How to compute.
        stage: The part to build; all of it if None. `mds_core.pipeline` connects the parts.

    Raises:
        ValueError: The layout does not divide the model, or two settings exclude each other.
    """

    def __init__(
        self,
        config: GPTConfig,
        groups: ProcessGroups,
        *,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        execution: Execution | None = None,
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        execution.check(config)
        config.check_tp(groups.tp_size)
        if execution.sequence_sharing == "ulysses":
            config.check_ulysses(groups.ulysses_size, tp_size=groups.tp_size)
        split = groups.tp_size if execution.expert_tensor_parallel else 1
        config.check_expert_parallel(groups.ep_size, tp_size=split)
        check_divided(stage, groups, kind="GPT")
        self.config, self.groups, self.seed = config, groups, seed
        self.execution = execution
        self.dtype = dtype
        self.stage = stage or Stage.whole(config.num_layers)
        self.sequence_parallel = execution.sequence_parallel and groups.tp is not None
        self.share = SequenceShare(
            groups,
            ring=execution.sequence_sharing == "ring",
            sequence_parallel=self.sequence_parallel,
        )
        self._contexts = ContextMaker(config, execution, self.share, dtype)
        build = Build(config, groups, execution, dtype, device)
        self.embedding = self.output_layer = None
        if self.stage.first or (self.stage.last and config.tie_embeddings):
            self.embedding = Embedding(build, table_only=not self.stage.first)
        self.decoder = Stack(build, layers=self.stage.layers, final=self.stage.last)
        self.adapter_dropout = 0.0
        """Of low-rank adapters, once there are some (`mds_core.models.add_adapters`)."""
        if self.stage.last and not config.tie_embeddings:
            self.output_layer = build.head()
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the start values; after ``to_empty`` this makes a meta model real."""
        initialize(self, seed=self.seed)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each parameter, by canonical name."""
        return parameter_shards(self)

    def expert_parameters(self) -> frozenset[str]:
        """Names of this rank's experts' parameters, which ranks along ``ep`` do not share."""
        names = parameter_shards(self)
        return frozenset(name for name in names if ".local_experts." in name)

    def new_cache(self, batch_size: int, *, max_length: int) -> KVCache:
        """An empty cache for generating ``batch_size`` sequences of at most ``max_length``."""
        return KVCache(batch_size, **self._cache_options(max_length))

    def new_slots(self, slots: int, *, max_length: int) -> SlotCache:
        """An empty cache for up to ``slots`` sequences at a time, which come and go."""
        return SlotCache(slots, **self._cache_options(max_length))

    def _cache_options(self, max_length: int) -> _CacheOptions:
        if self.groups.ulysses is not None:
            raise ValueError(
                f"ulysses_size is {self.groups.ulysses_size}, but new tokens come one at a time "
                f"and cannot be split; generate with ulysses_size=1."
            )
        return {
            "max_length": max_length,
            "kv_heads": max(self.config.kv_heads // self.groups.tp_size, 1),
            "channels": self.config.channels,
            "dtype": self.dtype,
            "device": next(self.parameters()).device,
        }

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
        cumulative_lengths: Tensor | None = None,
        cache: KVCache | SlotRows | None = None,
    ) -> Tensor | GPTLoss:
        """Return the loss if there are labels, else the logits.

        Args:
            tokens: [b, s] int64 ids.
            labels: [b, s] int64 ids of the next tokens.
            loss_mask: [b, s] weight of each token's loss; ones if None.
            position_ids: [b, s] int64; counted from 0 (from what the cache holds) if None.
            dropout_key: Needed in training mode if the model has dropout.
            cumulative_lengths: [documents + 1] bounds of the documents in the flattened batch, from
                0 to b s; tokens of other documents are then invisible.
            cache: Earlier tokens' keys and values; it grows by these tokens.

        Returns:
            A `GPTLoss`, or logits [b, s, v] of the true vocabulary on every rank.
        """
        if position_ids is None and cache is not None:
            position_ids = cache.positions(tokens.size(1))
        position_ids, documents = numbered(tokens, position_ids, cumulative_lengths)
        hidden, cost = self.forward_routed(
            tokens,
            position_ids=position_ids,
            dropout_key=dropout_key,
            documents=documents,
            cache=cache,
        )
        if cache is not None:
            cache.advance(tokens.size(1))
        if labels is None:
            return self.logits(hidden)
        return self.loss(hidden, labels, loss_mask, routing_cost=cost)

    def forward_stage(
        self,
        x: Tensor,
        *,
        position_ids: Tensor,
        dropout_key: DropoutKey | None = None,
        documents: Tensor | None = None,
        cache: KVCache | SlotRows | None = None,
    ) -> Tensor:
        """Run this stage's embedding, if it has it, and layers, whatever their routing costs.

        Args:
            x: [b, s] int64 tokens on the first stage, else [b, s, h] of the stage before.
            position_ids: [b or 1, s] int64.
            dropout_key: Needed in training mode if the model has dropout.
            documents: [b, s] number of each token's document; None if all is one.
            cache: Earlier tokens' keys and values.

        Returns:
            [b, s, h]; after the last stage they are normalised.
        """
        hidden, _ = self.forward_routed(
            x,
            position_ids=position_ids,
            dropout_key=dropout_key,
            documents=documents,
            cache=cache,
        )
        return hidden

    def forward_routed(
        self,
        x: Tensor,
        *,
        position_ids: Tensor,
        dropout_key: DropoutKey | None = None,
        documents: Tensor | None = None,
        cache: KVCache | SlotRows | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward_stage`; also give what the routing of each sequence costs.

        Returns:
            [b, s, h], and [b] costs or None if no layer of this stage has experts.
        """
        self._check_positions(position_ids)
        context = self._context(position_ids, dropout_key, documents, cache)
        if self.stage.first and self.embedding is not None:
            x = self.embedding(self.share.own(x), position_ids, context)
        return self.decoder(x, context)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map the last stage's [b, s, h] to logits [b, s, v] of the true vocabulary."""
        head = self._head()
        logits = gather(F.linear(self._whole(hidden), head.weight), group=self.groups.tp, dim=-1)
        return self.share.joined(logits)[..., : self.config.vocab_size]

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        *,
        routing_cost: Tensor | None = None,
    ) -> GPTLoss:
        """Compare the last stage's hidden states with labels.

        Args:
            hidden: [b, s, h].
            labels: [b, s] int64.
            loss_mask: [b, s] weight of each token's loss; ones if None.
            routing_cost: [b] from `forward_routed`; in training it joins the loss.
        """
        head = self._head()
        loss_sum, losses = linear_cross_entropy(
            self._whole(hidden).flatten(0, 1),
            head.weight,
            self.share.own(labels).flatten(),
            loss_weights=None if loss_mask is None else self.share.own(loss_mask).flatten(),
            vocab_start=head.start,
            vocab_size=self.config.vocab_size,
            group=self.groups.tp,
        )
        ulysses = self.groups.ulysses
        losses = self.share.joined(losses.view(len(labels), -1))
        loss_sum = reduce(loss_sum, group=ulysses)
        if routing_cost is None:
            return GPTLoss(loss_sum, losses)
        routing_sum = self.routing_sum(routing_cost, labels, loss_mask)
        return RoutedLoss(loss_sum + routing_sum, losses, routing_sum=routing_sum.detach())

    def routing_sum(
        self, routing_cost: Tensor, labels: Tensor, loss_mask: Tensor | None = None
    ) -> Tensor:
        """The routing's part of the loss: costs [b] times the weight of each sequence's tokens."""
        if not self.training:
            return torch.zeros_like(routing_cost[:1]).sum()
        if loss_mask is None:
            return routing_cost.sum() * labels.size(1)
        return (routing_cost * loss_mask.sum(1).to(routing_cost.dtype)).sum()

    def _head(self) -> VocabParallelEmbedding | VocabParallelHead:
        if self.output_layer is not None:
            return self.output_layer
        if not self.stage.last or self.embedding is None:
            raise headless(self.stage)
        return self.embedding.word_embeddings

    def _whole(self, hidden: Tensor) -> Tensor:
        """All positions of the tensor-parallel ranks, each of which uses them for its own part."""
        if self.sequence_parallel:
            return gather_partial(hidden, group=self.groups.tp, dim=1)
        return copy(hidden, group=self.groups.tp)

    def _context(
        self,
        position_ids: Tensor,
        dropout_key: DropoutKey | None,
        documents: Tensor | None,
        cache: KVCache | SlotRows | None,
    ) -> Context:
        return self._contexts.of(
            Sequences(
                position_ids,
                active_key(dropout_key, config=self.config, training=self.training),
                documents,
                cache,
                self._adapter_dropout(dropout_key, position_ids.size(1)),
            )
        )

    def _adapter_dropout(self, key: DropoutKey | None, length: int) -> AdapterDropout | None:
        if not self.training or not self.adapter_dropout:
            return None
        if key is None:
            raise ValueError(
                f"the adapters drop ({self.adapter_dropout}), so forward needs a dropout_key with "
                f"the seed and the samples' numbers. Pass one, or call eval()."
            )
        return AdapterDropout(key, self.share.rows(length), self.share.between(length))

    @property
    def sequence_shares(self) -> int:
        """Ranks over which the positions of the residual stream are split."""
        return self.share.shares

    def _check_positions(self, position_ids: Tensor) -> None:
        limit = self.config.max_position_embeddings
        if self.config.position_embedding != "learned" or position_ids.device.type != "cpu":
            return
        if torch.compiler.is_compiling():  # the lookup of compiled code checks its indices
            return
        if position_ids.numel():
            check_positions(int(position_ids.max()) + 1, limit=limit)
