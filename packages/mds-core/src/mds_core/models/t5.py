"""T5 as Megatron builds it: an encoder, and a decoder that attends to it, over one vocabulary.

What is notable here:

- encoder, decoder and output layer share one table of token vectors, and both stacks one table of
  learned positions; the output layer adds a bias of its own;
- the layers are those of GPT; the decoder's have a second attention between the two halves;
- padding of the encoder's tokens is hidden from both stacks;
- the stages of a pipeline share out the layers of both stacks, encoder first; from stage to stage
  of the decoder the encoder's output travels with the decoder's stream, as one tensor.

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
from mds_core.groups import ProcessGroups
from mds_core.layers.attention import Context, Memory
from mds_core.layers.embedding import (
    VocabParallelBias,
    VocabParallelEmbedding,
    check_positions,
)
from mds_core.models.block import Build, Stack, active_key
from mds_core.models.embedding import Embedding
from mds_core.models.losses import GPTLoss
from mds_core.models.sequence import SequenceShare
from mds_core.models.staged import check_divided, headless
from mds_core.parameter import initialize, parameter_shards
from mds_core.partition import Stage
from mds_core.rng import DropoutKey
from mds_core.sharding import ParameterShard
from mds_core.t5_config import T5Config
from mds_kernels import cross_entropy

__all__ = ["T5"]


class T5(nn.Module):
    """An encoder and a decoder on this rank's share of a layout.

    Args:
        config: Shape of the model.
        groups: The ranks that share it; their layout may have tp, pp and dp.
        seed: From which the start values follow, together with the parameters' names.
        dtype: Of the parameters.
        device: Of the parameters; on ``"meta"`` nothing is allocated or initialised.
        execution: How to compute.
        stage: The part to build, of the layers of both stacks; all of it if None.
            `mds_core.pipeline` connects the parts.

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
        stage: Stage | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        execution.check(config)
        execution.check_short("T5")
        config.check_tp(groups.tp_size)
        _check_layout(groups)
        check_divided(stage, groups, kind="T5")
        self.config, self.groups, self.seed, self.dtype = config, groups, seed, dtype
        self.stage = stage or Stage.whole(config.stacked_layers)
        self.sequence_parallel = execution.sequence_parallel and groups.tp is not None
        self.share = SequenceShare(groups, ring=False, sequence_parallel=self.sequence_parallel)
        self._build(Build(config, groups, execution, dtype, device))
        if torch.device(device or "cpu").type != "meta":
            self.reset_parameters()

    def _build(self, build: Build) -> None:
        """Make the parts of this stage."""
        config, stage, split = self.config, self.stage, self.config.num_layers
        self.embedding = self.encoder = self.decoder = self.output_layer = None
        embeds = stage.first or split in stage.layers
        if embeds or stage.last:
            self.embedding = Embedding(build, table_only=not embeds)
        if stage.layers.start < split:
            layers = range(stage.layers.start, min(stage.layers.stop, split))
            self.encoder = Stack(build, layers=layers, final=layers.stop == split)
        if stage.layers.stop > split:
            self.decoder = Stack(
                build,
                layers=range(max(stage.layers.start - split, 0), stage.layers.stop - split),
                final=stage.last,
                numbered_from=split,
                decoder=True,
            )
        if stage.last:
            self.output_layer = VocabParallelBias(
                config.vocab_size,
                padded_size=config.padded_vocab_size(self.groups.tp_size),
                tp=self.groups.tp,
                dtype=build.dtype,
                device=build.device,
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
        if labels is None:
            logits = gather(self._scores(hidden), group=self.groups.tp, dim=-1)
            return logits[..., : self.config.vocab_size]
        return self.loss(hidden, labels, loss_mask)

    def forward_stage(
        self,
        x: Tensor,
        *,
        decoder_tokens: Tensor,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run this stage's layers.

        Args:
            x: [b, s] int64 tokens for the encoder on the first stage, else what the stage before
                gave.
            decoder_tokens: [b, r] int64, on all stages.
            padding_mask: As for `forward`.
            dropout_key: As for `forward`.

        Returns:
            [b, s, h] before the decoder, [b, s + r, h] in it, the encoder's output first, and
            [b, r, h] behind the last stage.
        """
        memory, stream = self._parted(x, decoder_tokens)
        if self.encoder is not None:
            memory = self.encode(memory, padding_mask=padding_mask, dropout_key=dropout_key)
        if self.decoder is None:
            return memory
        stream = self.decode(
            decoder_tokens,
            memory,
            stream=stream,
            padding_mask=padding_mask,
            dropout_key=dropout_key,
        )
        return stream if self.stage.last else torch.cat([memory, stream], dim=1)

    def _parted(self, x: Tensor, decoder_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a stage is given: the encoder's part, and the decoder's where that has begun."""
        if self.stage.layers.start <= self.config.num_layers:
            return x, None
        own = decoder_tokens.size(1) // self.sequence_shares
        memory, stream = x.split([x.size(1) - own, own], dim=1)  # type: ignore[no-untyped-call]
        return memory, stream

    def encode(
        self,
        x: Tensor,
        *,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run this stage's layers of the encoder.

        Args:
            x: [b, s] int64 tokens, behind the first stage [b, s, h].
            padding_mask: As for `forward`.
            dropout_key: As for `forward`.

        Returns:
            [b, s, h], this rank's positions with sequence parallelism.
        """
        assert self.encoder is not None, "a stage of the decoder encodes nothing"
        length = x.size(1) * (1 if self.stage.first else self.sequence_shares)
        seen = _seen(padding_mask, rows=x.size(0), length=length, queries=length, device=x.device)
        context = self._context(length, seen, dropout_key, memory=None)
        if self.stage.first and self.embedding is not None:
            x = self.embedding(x, _counted(x), context)
        hidden, _ = self.encoder(x, context)
        return hidden  # type: ignore[no-any-return]

    def decode(
        self,
        decoder_tokens: Tensor,
        memory: Tensor,
        *,
        stream: Tensor | None = None,
        padding_mask: Tensor | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Tensor:
        """Run this stage's layers of the decoder.

        Args:
            decoder_tokens: [b, r] int64.
            memory: [b, s, h], what `encode` made of the same samples.
            stream: [b, r, h] of the stage before; the tokens are embedded if None.
            padding_mask: As for `forward`.
            dropout_key: As for `forward`.

        Returns:
            [b, r, h], this rank's positions with sequence parallelism.
        """
        assert self.decoder is not None, "a stage of the encoder decodes nothing"
        rows, queries = decoder_tokens.shape
        length = memory.size(1) * self.sequence_shares
        mask = _seen(padding_mask, rows=rows, length=length, queries=queries, device=memory.device)
        context = self._context(queries, None, dropout_key, memory=Memory(memory, mask))
        if stream is None:
            assert self.embedding is not None, "only a stage that begins the decoder embeds"
            first, positions = self.config.num_layers, _counted(decoder_tokens)
            stream = self.embedding(decoder_tokens, positions, context, layer=first)
        hidden, _ = self.decoder(stream, context)
        return hidden  # type: ignore[no-any-return]

    def loss(self, hidden: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> GPTLoss:
        """Compare the last stage's hidden states [b, r, h] with labels [b, r]."""
        scores, (table, _) = self._scores(hidden), self._head()
        losses = cross_entropy(
            scores.flatten(0, 1),
            labels.flatten(),
            vocab_start=table.start,
            vocab_size=self.config.vocab_size,
            group=self.groups.tp,
        ).view_as(labels)
        weighted = losses if loss_mask is None else losses * loss_mask
        return GPTLoss(weighted.sum(), losses.detach())

    def _scores(self, hidden: Tensor) -> Tensor:
        """This rank's columns [b, r, v / t] of the scores of [b, r, h]."""
        if self.sequence_parallel:
            hidden = gather_partial(hidden, group=self.groups.tp, dim=1)
        else:
            hidden = copy(hidden, group=self.groups.tp)
        table, bias = self._head()
        return F.linear(hidden, table.weight, bias.bias)

    def _head(self) -> tuple[VocabParallelEmbedding, VocabParallelBias]:
        if self.embedding is None or self.output_layer is None:
            raise headless(self.stage)
        return self.embedding.word_embeddings, self.output_layer

    @property
    def sequence_shares(self) -> int:
        """Ranks over which the positions of a stream are split."""
        return self.share.shares

    def _context(
        self,
        length: int,
        mask: Tensor | None,
        dropout_key: DropoutKey | None,
        *,
        memory: Memory | None,
    ) -> Context:
        check_positions(length, limit=self.config.max_position_embeddings)
        return Context(
            rotation=None,
            mask=mask,
            dropout=active_key(dropout_key, config=self.config, training=self.training),
            cache=None,
            rows=self.share.rows(length),
            memory=memory,
        )


def _counted(tokens: Tensor) -> Tensor:
    """Positions [1, s] of tokens [b, s]."""
    return torch.arange(tokens.size(1), device=tokens.device)[None]


def _seen(
    padding_mask: Tensor | None, *, rows: int, length: int, queries: int, device: torch.device
) -> Tensor:
    """Which encoder positions each query sees, [b, 1, queries, s] bool."""
    if padding_mask is None:
        padding_mask = torch.ones(rows, length, dtype=torch.bool, device=device)
    return padding_mask.bool()[:, None, None, :].expand(-1, 1, queries, -1)


def _check_layout(groups: ProcessGroups) -> None:
    if groups.ulysses_size > 1:
        raise ValueError(
            f"ulysses_size is {groups.ulysses_size}, but a T5 splits over tp_size, pp_size and "
            f"dp_size only; set ulysses_size=1."
        )
