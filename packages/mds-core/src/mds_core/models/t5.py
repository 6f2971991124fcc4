"""T5 as Megatron builds it: an encoder, and a decoder that attends to it, over one vocabulary.

What is notable here:

- encoder, decoder and output layer share one table of token vectors, and both stacks one table of
  learned positions; the output layer adds a bias of its own;
- the layers are those of GPT; the decoder's have a second attention between the two halves;
- padding of the encoder's tokens is hidden from both stacks.

Shapes: ``b`` micro batch, ``s`` encoder sequence, ``r`` decoder sequence, ``h`` hidden, ``v``
vocabulary, ``t`` tensor-parallel size. With sequence parallelism both streams hold a ``t``-th of
their positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mds_core.collectives import copy, gather, gather_partial
from mds_core.config import Execution
from mds_core.groups import ProcessGroups, group_size
from mds_core.layers.attention import Context, Memory
from mds_core.layers.embedding import (
    PositionEmbedding,
    VocabParallelBias,
    VocabParallelEmbedding,
    check_positions,
)
from mds_core.models.block import Build, Stack, active_key, drop
from mds_core.models.gpt import GPTLoss
from mds_core.parameter import initialize, parameter_shards
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard
from mds_core.t5_config import T5Config
from mds_kernels import cross_entropy

__all__ = ["T5"]


class Embedding(nn.Module):
    """Token plus position vectors, of both stacks."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        self.probability = config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            padded_size=config.padded_vocab_size(group_size(build.tp)),
            tp=build.tp,
            std=config.init_std,
            sequence_parallel=build.execution.sequence_parallel,
            dtype=build.dtype,
            device=build.device,
        )
        self.layernorm = build.norm() if config.embedding_norm else None
        self.position_embeddings = PositionEmbedding(
            config.max_position_embeddings,
            config.hidden_size,
            std=config.init_std,
            partial_over=build.tp if build.execution.sequence_parallel else None,
            dtype=build.dtype,
            device=build.device,
        )

    def forward(self, tokens: Tensor, context: Context, *, layer: int) -> Tensor:
        """Map tokens [b, s] to this rank's positions [b, s, h]; ``layer`` keys the dropout."""
        hidden: Tensor = self.word_embeddings(tokens)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        (rows,) = context.rows
        own = torch.arange(rows.start, rows.stop, device=tokens.device)[None]
        hidden = hidden + self.position_embeddings(own)
        return drop(hidden, context, layer=layer, site="embedding", probability=self.probability)


class T5(nn.Module):
    """An encoder and a decoder on this rank's share of a layout.

    Args:
        config: Shape of the model.
        groups: The ranks that share it; their layout may have tp and dp.
        seed: From which the start values follow, together with the parameters' names.
        dtype: Of the parameters.
        device: Of the parameters; on ``"meta"`` nothing is allocated or initialised.
        execution: How to compute.

    Raises:
        ValueError: The layout does not divide the model, or a T5 cannot be split so.
    """

    def __init__(
        self,
        config: T5Config,
        groups: ProcessGroups,
        *,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        execution: Execution | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        execution.check(config)
        execution.check_short("T5")
        config.check_tp(groups.tp_size)
        _check_layout(groups)
        self.config, self.groups, self.seed, self.dtype = config, groups, seed, dtype
        self.sequence_parallel = execution.sequence_parallel and groups.tp is not None
        build = Build(config, groups, execution, dtype, device)
        self.embedding = Embedding(build)
        self.encoder = Stack(build, layers=range(config.num_layers), final=True)
        self.decoder = Stack(
            build,
            layers=range(config.decoder_layers),
            final=True,
            numbered_from=config.num_layers,
            decoder=True,
        )
        self.output_layer = VocabParallelBias(
            config.vocab_size,
            padded_size=config.padded_vocab_size(groups.tp_size),
            tp=groups.tp,
            dtype=dtype,
            device=device,
        )
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the start values; after ``to_empty`` this makes a meta model real."""
        initialize(self, seed=self.seed)

    def parameter_shards(self) -> dict[str, ParameterShard]:
        """What this rank holds of each parameter, by canonical name."""
        return parameter_shards(self)

    def forward(
        self,
        tokens: Tensor,
        decoder_tokens: Tensor,
        labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor | GPTLoss:
        """Return the loss if there are labels, else the logits.

        Args:
            tokens: [b, s] int64 ids for the encoder.
            decoder_tokens: [b, r] int64 ids for the decoder, padded at the end if at all.
            labels: [b, r] int64 ids of the decoder's next tokens.
            loss_mask: [b, r] weight of each token's loss; ones if None.
            padding_mask: [b, s] true where the encoder has a token, false in padding; no padding if
                None.
            dropout_key: Needed in training mode if the model has dropout.

        Returns:
            A `GPTLoss`, or logits [b, r, v] of the true vocabulary on every rank.
        """
        memory = self.encode(tokens, padding_mask=padding_mask, dropout_key=dropout_key)
        hidden = self.decode(
            decoder_tokens, memory, padding_mask=padding_mask, dropout_key=dropout_key
        )
        scores = self._scores(hidden)
        if labels is None:
            logits = gather(scores, group=self.groups.tp, dim=-1)
            return logits[..., : self.config.vocab_size]
        losses = cross_entropy(
            scores.flatten(0, 1),
            labels.flatten(),
            vocab_start=self.embedding.word_embeddings.start,
            vocab_size=self.config.vocab_size,
            group=self.groups.tp,
        ).view_as(labels)
        weighted = losses if loss_mask is None else losses * loss_mask
        return GPTLoss(weighted.sum(), losses.detach())

    def encode(
        self,
        tokens: Tensor,
        *,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run the encoder on tokens [b, s]; arguments and shapes as for `forward`.

        Returns:
            [b, s, h], this rank's positions with sequence parallelism.
        """
        seen = _seen(padding_mask, tokens=tokens, queries=tokens.size(1))
        context = self._context(tokens, seen, dropout_key, memory=None)
        hidden, _ = self.encoder(self.embedding(tokens, context, layer=0), context)
        return hidden  # type: ignore[no-any-return]

    def decode(
        self,
        decoder_tokens: Tensor,
        memory: Tensor,
        *,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run the decoder on tokens [b, r], given what `encode` made of the same samples.

        Returns:
            [b, r, h], this rank's positions with sequence parallelism.
        """
        length = memory.size(1) * (self.groups.tp_size if self.sequence_parallel else 1)
        ones = torch.ones(memory.size(0), length, dtype=torch.bool, device=memory.device)
        mask = _seen(padding_mask, tokens=ones, queries=decoder_tokens.size(1))
        context = self._context(decoder_tokens, None, dropout_key, memory=Memory(memory, mask))
        first = self.config.num_layers
        hidden, _ = self.decoder(self.embedding(decoder_tokens, context, layer=first), context)
        return hidden  # type: ignore[no-any-return]

    def _scores(self, hidden: Tensor) -> Tensor:
        """This rank's columns [b, r, v / t] of the scores of [b, r, h]."""
        if self.sequence_parallel:
            hidden = gather_partial(hidden, group=self.groups.tp, dim=1)
        else:
            hidden = copy(hidden, group=self.groups.tp)
        return F.linear(hidden, self.embedding.word_embeddings.weight, self.output_layer.bias)

    def _context(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        dropout_key: DropoutKey | None,
        *,
        memory: Memory | None,
    ) -> Context:
        check_positions(tokens.size(1), limit=self.config.max_position_embeddings)
        return Context(
            rotation=None,
            mask=mask,
            dropout=active_key(dropout_key, config=self.config, training=self.training),
            cache=None,
            rows=(self._rows(tokens.size(1)),),
            memory=memory,
        )

    def _rows(self, length: int) -> range:
        """Positions that this rank's residual stream holds."""
        if not self.sequence_parallel:
            return range(length)
        share, rest = divmod(length, self.groups.tp_size)
        if rest:
            raise ValueError(
                f"the sequence length ({length}) is not a multiple of tp_size "
                f"({self.groups.tp_size}), which sequence_parallel splits it by. Pad the sequence "
                f"or switch sequence_parallel off."
            )
        return range(self.groups.tp_rank * share, (self.groups.tp_rank + 1) * share)


def _seen(padding_mask: Tensor | None, *, tokens: Tensor, queries: int) -> Tensor:
    """Which encoder positions each query sees, [b, 1, queries, s] bool."""
    seen = torch.ones_like(tokens, dtype=torch.bool) if padding_mask is None else padding_mask
    return seen.bool()[:, None, None, :].expand(-1, 1, queries, -1)


def _check_layout(groups: ProcessGroups) -> None:
    for name in ("pp_size", "ulysses_size"):
        if getattr(groups, name) > 1:
            raise ValueError(
                f"{name} is {getattr(groups, name)}, but a T5 splits over tp_size and dp_size "
                f"only; set {name}=1."
            )
