"""BERT: an encoder that sees both directions, with a masked-word head and a binary head.

What is notable here:

- the layers are those of GPT; post-LN is one field of the configuration;
- the binary head reads the first token and says whether two segments belong together;
- padding is hidden from all other tokens.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden, ``v`` vocabulary, ``t`` tensor-parallel
size. With sequence parallelism the residual stream holds a ``t``-th of the positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mds_core.bert_config import BertConfig
from mds_core.collectives import copy, gather, gather_partial
from mds_core.config import Execution
from mds_core.groups import ProcessGroups
from mds_core.layers.attention import Context
from mds_core.layers.embedding import VocabParallelBias, check_positions
from mds_core.layers.linear import ReplicatedLinear
from mds_core.models.bert_embedding import BertEmbedding
from mds_core.models.bert_heads import Pooler, WordTransform
from mds_core.models.block import Build, Stack, active_key
from mds_core.models.sequence import SequenceShare
from mds_core.models.staged import check_divided, headless
from mds_core.parameter import initialize, parameter_shards
from mds_core.partition import Stage
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard
from mds_kernels import cross_entropy

__all__ = ["Bert", "BertLogits", "BertLoss"]


class BertLogits(NamedTuple):
    """What a forward pass without labels gives."""

    words: Tensor
    """[b, s, v] scores of the true vocabulary, on every rank."""
    binary: Tensor | None
    """[b, 2] scores of the binary head."""


class BertLoss(NamedTuple):
    """What a forward pass with labels gives."""

    loss_sum: Tensor
    """Scalar, the masked sum of the words' losses, differentiable; fp32, or float64."""
    losses: Tensor
    """[b, s] losses of the words, not masked, detached."""
    binary_sum: Tensor | None
    """Scalar, the sum of the binary head's losses, differentiable; None without its labels."""


class Bert(nn.Module):
    """An encoder on this rank's share of a layout.

    Args:
        config: Shape of the model.
        groups: The ranks that share it; their layout may have tp, pp and dp.
        seed: From which the start values follow, together with the parameters' names.
        dtype: Of the parameters.
        device: Of the parameters; on ``"meta"`` nothing is allocated or initialised.
        execution: How to compute.
        stage: The part to build; all of it if None. `mds_core.pipeline` connects the parts.

    Raises:
        ValueError: The layout does not divide the model, or a BERT cannot be split so.
    """

    def __init__(
        self,
        config: BertConfig,
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
        execution.check_short("BERT")
        config.check_tp(groups.tp_size)
        _check_layout(groups)
        self.config, self.groups, self.seed, self.dtype = config, groups, seed, dtype
        check_divided(stage, groups, kind="Bert")
        self.stage = stage or Stage.whole(config.num_layers)
        self.sequence_parallel = execution.sequence_parallel and groups.tp is not None
        self.share = SequenceShare(groups, ring=False, sequence_parallel=self.sequence_parallel)
        build = Build(config, groups, execution, dtype, device)
        self.embedding = None
        if self.stage.first or self.stage.last:
            self.embedding = BertEmbedding(
                build,
                num_token_types=config.num_token_types,
                table_only=not self.stage.first,
            )
        self.encoder = Stack(build, layers=self.stage.layers, final=self.stage.last)
        self.lm_head: WordTransform | None = None
        self.output_layer: VocabParallelBias | None = None
        self.pooler: Pooler | None = None
        self.binary_head: ReplicatedLinear | None = None
        if self.stage.last:
            self._build_heads(build)
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def _build_heads(self, build: Build) -> None:
        config, dtype, device = self.config, build.dtype, build.device
        self.lm_head = WordTransform(build)
        self.output_layer = VocabParallelBias(
            config.vocab_size,
            padded_size=config.padded_vocab_size(self.groups.tp_size),
            tp=self.groups.tp,
            dtype=dtype,
            device=device,
        )
        if config.binary_head:
            self.pooler = Pooler(build)
            self.binary_head = ReplicatedLinear(
                config.hidden_size, 2, std=config.init_std, dtype=dtype, device=device
            )

    def reset_parameters(self) -> None:
        """Write the start values; after ``to_empty`` this makes a meta model real."""
        initialize(self, seed=self.seed)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each parameter, by canonical name."""
        return parameter_shards(self)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        binary_labels: Tensor | None = None,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> BertLogits | BertLoss:
        """Return the losses if there are labels, else the logits.

        Args:
            tokens: [b, s] int64 ids.
            labels: [b, s] int64 ids of the words that stood there.
            loss_mask: [b, s] weight of each word's loss, 1 where it was masked; ones if None.
            binary_labels: [b] int64, 0 or 1.
            token_types: [b, s] int64 segment of each token; all 0 if None.
            padding_mask: [b, s] true where there is a token, false in padding; no padding if None.
            dropout_key: Needed in training mode if the model has dropout.
        """
        hidden = self.forward_stage(
            tokens, token_types=token_types, padding_mask=padding_mask, dropout_key=dropout_key
        )
        if labels is None:
            words = gather(self._word_scores(hidden), group=self.groups.tp, dim=-1)
            return BertLogits(words[..., : self.config.vocab_size], self._binary_scores(hidden))
        return self.loss(hidden, labels, loss_mask, binary_labels=binary_labels)

    def forward_stage(
        self,
        x: Tensor,
        *,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run this stage's embedding, if it has it, and layers.

        Args:
            x: [b, s] int64 tokens on the first stage, else [b, s, h] of the stage before.
            token_types: As for `forward`.
            padding_mask: As for `forward`.
            dropout_key: As for `forward`.

        Returns:
            [b, s, h]; after the last stage they are normalised.
        """
        context = self._context(x, padding_mask, dropout_key)
        if self.stage.first and self.embedding is not None:
            types = torch.zeros_like(x) if token_types is None else token_types
            x = self.embedding(x, types, context)
        hidden, _ = self.encoder(x, context)
        return hidden  # type: ignore[no-any-return]

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        *,
        binary_labels: Tensor | None = None,
    ) -> BertLoss:
        """Compare what the heads make of the last stage's hidden states with labels.

        Args:
            hidden: [b, s, h].
            labels: As for `forward`.
            loss_mask: As for `forward`.
            binary_labels: As for `forward`.
        """
        losses = self._word_losses(self._word_scores(hidden), labels)
        weighted = losses if loss_mask is None else losses * loss_mask
        binary, binary_sum = self._binary_scores(hidden), None
        if binary is not None and binary_labels is not None:
            precision = torch.promote_types(binary.dtype, torch.float32)
            binary_sum = F.cross_entropy(binary.to(precision), binary_labels, reduction="sum")
        return BertLoss(weighted.sum(), losses.detach(), binary_sum)

    @property
    def sequence_shares(self) -> int:
        """Ranks over which the positions of the residual stream are split."""
        return self.share.shares

    def pooled(
        self,
        tokens: Tensor,
        *,
        token_types: Tensor | None = None,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """One vector [b, h] of each sample, on which heads of other tasks can stand.

        Args:
            tokens: As for `forward`.
            token_types: As for `forward`.
            padding_mask: As for `forward`.
            dropout_key: As for `forward`.

        Raises:
            ValueError: The model has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this BERT has no pooler; build it with binary_head=True.")
        hidden = self.forward_stage(
            tokens, token_types=token_types, padding_mask=padding_mask, dropout_key=dropout_key
        )
        return self.pooler(hidden)  # type: ignore[no-any-return]

    def _context(
        self, x: Tensor, padding_mask: Tensor | None, dropout_key: DropoutKey | None
    ) -> Context:
        length = x.size(1) * (1 if self.stage.first else self.sequence_shares)
        seen = padding_mask
        check_positions(length, limit=self.config.max_position_embeddings)
        if seen is None:
            seen = torch.ones(x.size(0), length, dtype=torch.bool, device=x.device)
        return Context(
            rotation=None,
            mask=seen.bool()[:, None, None, :].expand(-1, 1, length, -1),
            dropout=active_key(dropout_key, config=self.config, training=self.training),
            cache=None,
            rows=self.share.rows(length),
        )

    def _word_scores(self, hidden: Tensor) -> Tensor:
        """This rank's columns [b, s, v / t] of the words' scores."""
        if self.embedding is None or self.lm_head is None or self.output_layer is None:
            raise headless(self.stage)
        transformed = self.lm_head(hidden)
        if self.sequence_parallel:
            transformed = gather_partial(transformed, group=self.groups.tp, dim=1)
        else:
            transformed = copy(transformed, group=self.groups.tp)
        return F.linear(transformed, self.embedding.word_embeddings.weight, self.output_layer.bias)

    def _binary_scores(self, hidden: Tensor) -> Tensor | None:
        if self.pooler is None or self.binary_head is None:
            return None
        return self.binary_head(self.pooler(hidden))  # type: ignore[no-any-return]

    def _word_losses(self, scores: Tensor, labels: Tensor) -> Tensor:
        assert self.embedding is not None
        losses = cross_entropy(
            scores.flatten(0, 1),
            labels.flatten(),
            vocab_start=self.embedding.word_embeddings.start,
            vocab_size=self.config.vocab_size,
            group=self.groups.tp,
        )
        return losses.view_as(labels)


def _check_layout(groups: ProcessGroups) -> None:
    if groups.ulysses_size > 1:
        raise ValueError(
            f"ulysses_size is {groups.ulysses_size}, but a BERT splits over tp_size, pp_size and "
            f"dp_size only; set ulysses_size=1."
        )
