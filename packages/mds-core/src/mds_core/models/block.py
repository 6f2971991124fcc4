"""What the models are built of: layers of attention and MLP around a residual stream.

Shapes: ``b`` micro batch, ``s`` sequence (this rank's positions), ``h`` hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups, group_size
from mds_core.layers.attention import Context, SelfAttention
from mds_core.layers.cross_attention import CrossAttention
from mds_core.layers.embedding import (
    PositionEmbedding,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from mds_core.layers.mlp import MLP
from mds_core.layers.moe import MoE
from mds_core.layers.norm import Norm
from mds_core.memory import again, on_host
from mds_core.rng import DropoutKey, Site, dropout, keep_mask

__all__ = ["Build", "Stack", "TransformerLayer", "active_key", "drop"]


class Build(NamedTuple):
    """What every part of the model is built from."""

    config: GPTConfig
    groups: ProcessGroups
    execution: Execution
    dtype: torch.dtype
    device: torch.device | str | None

    @property
    def tp(self) -> ProcessGroup | None:
        """Ranks that share each layer."""
        return self.groups.tp

    def norm(self) -> Norm:
        """A norm of the residual stream."""
        return Norm(
            self.config.hidden_size,
            kind=self.config.normalization,
            epsilon=self.config.norm_epsilon,
            zero_centered=self.config.zero_centered_norm,
            partial_over=self.tp if self.execution.sequence_parallel else None,
            dtype=self.dtype,
            device=self.device,
        )

    def word_embeddings(self) -> VocabParallelEmbedding:
        """The table of the vocabulary, with which a model begins and a tied head ends."""
        return VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            padded_size=self.config.padded_vocab_size(group_size(self.tp)),
            tp=self.tp,
            std=self.config.init_std,
            sequence_parallel=self.execution.sequence_parallel,
            dtype=self.dtype,
            device=self.device,
        )

    def position_embeddings(self, count: int) -> PositionEmbedding:
        """A vector for each of ``count`` positions, or of as many kinds of segments."""
        return PositionEmbedding(
            count,
            self.config.hidden_size,
            std=self.config.init_std,
            partial_over=self.tp if self.execution.sequence_parallel else None,
            dtype=self.dtype,
            device=self.device,
        )

    def mlp(self, *, experts: int, layer: int) -> MLP | MoE:
        """One MLP for all tokens of a layer, or ``experts`` of them to choose from."""
        if experts:
            return MoE(
                self.config,
                experts=experts,
                layer=layer,
                groups=self.groups,
                execution=self.execution,
                dtype=self.dtype,
                device=self.device,
            )
        return MLP(
            self.config,
            tp=self.tp,
            sequence_parallel=self.execution.sequence_parallel,
            activate_again=self.execution.computes_again("activation"),
            dtype=self.dtype,
            device=self.device,
        )

    def head(self) -> VocabParallelHead:
        """An output layer of its own."""
        return VocabParallelHead(
            self.config.vocab_size,
            self.config.hidden_size,
            padded_size=self.config.padded_vocab_size(group_size(self.tp)),
            tp=self.tp,
            std=self.config.init_std,
            dtype=self.dtype,
            device=self.device,
        )


class TransformerLayer(nn.Module):
    """Attention and MLP, each normalised before and added to the residual stream after.

    The MLP reads the stream behind attention, with a parallel residual that before it. With
    ``residual_post_layernorm`` what is added to is the normalised stream (post-LN). A decoder's
    layer also attends to an encoder's output, between the two.

    Args:
        build: What every part of the model is built from.
        layer: Its number in its stack.
        numbered_from: Number of the stack's first layer in the model, for dropout.
        decoder: Whether it attends to an encoder.
    """

    def __init__(
        self, build: Build, *, layer: int, numbered_from: int = 0, decoder: bool = False
    ) -> None:
        super().__init__()
        config = build.config
        self.layer = numbered_from + layer
        self.execution = build.execution
        self.probability = config.hidden_dropout
        self.parallel_residual = config.parallel_residual
        self.residual_post_layernorm = config.residual_post_layernorm
        self.input_layernorm = build.norm()
        self.self_attention = SelfAttention(
            config,
            layer=self.layer,
            tp=build.tp,
            ulysses=build.groups.ulysses,
            execution=build.execution,
            dtype=build.dtype,
            device=build.device,
        )
        self.pre_cross_attn_layernorm = self.cross_attention = None
        if decoder:
            self.pre_cross_attn_layernorm = build.norm()
            self.cross_attention = CrossAttention(
                config,
                layer=self.layer,
                tp=build.tp,
                execution=build.execution,
                dtype=build.dtype,
                device=build.device,
            )
        self.pre_mlp_layernorm = build.norm()
        experts = 0 if decoder else config.experts[layer]
        self.mlp = build.mlp(experts=experts, layer=self.layer)

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Map [b, s, h] to [b, s, h] and what each sequence's routing costs, if it is routed."""
        attended, normed = self._attention(hidden, context)
        stream = normed if self.residual_post_layernorm else hidden
        stream = stream + self._drop(attended, context, site="attention_output")
        if self.pre_cross_attn_layernorm is not None and self.cross_attention is not None:
            normed = self.pre_cross_attn_layernorm(stream)
            whole = self.execution.computes_again("attention")
            seen = again(self.cross_attention, normed, context, active=whole)
            stream = normed if self.residual_post_layernorm else stream
            stream = stream + self._drop(seen, context, site="cross_attention_output")
        changed, cost, normed = self._mlp(hidden if self.parallel_residual else stream, context)
        stream = normed if self.residual_post_layernorm else stream
        return stream + self._drop(changed, context, site="mlp_output"), cost

    def _attention(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """What self-attention adds to the stream, and its normalised input."""
        if self.execution.computes_again("norm"):
            qkv = again(self._normed_qkv, hidden, context)
            return self.self_attention.attend(qkv, context), hidden
        normed = self.input_layernorm(hidden)
        whole = self.execution.computes_again("attention")
        return again(self.self_attention, normed, context, active=whole), normed

    def _normed_qkv(self, hidden: Tensor, context: Context) -> Tensor:
        normed = self.input_layernorm(hidden)
        return self.self_attention.linear_qkv(normed, context.adapters)  # type: ignore[no-any-return]

    def _mlp(self, stream: Tensor, context: Context) -> tuple[Tensor, Tensor | None, Tensor]:
        """What the MLP adds to the stream, what its routing costs, and its normalised input."""
        chunk = self.execution.sequence_chunk
        if isinstance(self.mlp, MLP) and self.execution.computes_again("norm") and chunk is None:
            wide = again(self._normed_fc1, stream, context)
            return self.mlp.narrow(wide, context.adapters), None, stream
        normed = self.pre_mlp_layernorm(stream)
        if isinstance(self.mlp, MLP) and chunk is not None:
            parts = torch.split(normed, chunk, dim=1)
            return torch.cat([again(self.mlp, part) for part in parts], dim=1), None, normed
        whole = self.execution.computes_again("mlp")
        if isinstance(self.mlp, MLP):
            return again(self.mlp, normed, context.adapters, active=whole), None, normed
        return (*again(self.mlp, normed, context.dropout, context.rows, active=whole), normed)

    def _normed_fc1(self, stream: Tensor, context: Context) -> Tensor:
        assert isinstance(self.mlp, MLP)
        normed = self.pre_mlp_layernorm(stream)
        return self.mlp.linear_fc1(normed, context.adapters)  # type: ignore[no-any-return]

    def _drop(self, x: Tensor, context: Context, *, site: Site) -> Tensor:
        return drop(x, context, layer=self.layer, site=site, probability=self.probability)


class Stack(nn.Module):
    """The layers, keyed by their global number, and the norm after the last.

    Args:
        build: What every part of the model is built from.
        layers: Numbers of the layers.
        final: Whether the last one is among them.
        numbered_from: Number of layer 0 in the model, where that has two stacks.
        decoder: Whether the layers attend to an encoder.
    """

    def __init__(
        self,
        build: Build,
        *,
        layers: range,
        final: bool,
        numbered_from: int = 0,
        decoder: bool = False,
    ) -> None:
        super().__init__()
        self.execution = build.execution
        self.layers = nn.ModuleDict(
            {
                str(layer): TransformerLayer(
                    build, layer=layer, numbered_from=numbered_from, decoder=decoder
                )
                for layer in layers
            }
        )
        self.final_layernorm = build.norm() if final else None

    def forward(self, hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Map [b, s, h] to [b, s, h] and what each sequence's routing costs, [b] or None."""
        layers = list(self.layers.values())
        full = self.execution.recompute == "full"
        step = self.execution.recompute_layers if full else len(layers)
        costs = []
        with on_host(active=self.execution.offload_activations and torch.is_grad_enabled()):
            for first in range(0, len(layers), step):
                block = layers[first : first + step]
                hidden, cost = again(_run, block, hidden, context, active=full)
                costs.append(cost)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return hidden, _total(costs)


def active_key(key: DropoutKey | None, *, config: GPTConfig, training: bool) -> DropoutKey | None:
    """Return the key if anything is dropped or drawn now.

    Raises:
        ValueError: Something is, and there is no key.
    """
    draws = config.hidden_dropout or config.attention_dropout or config.router_draws
    if not training or not draws:
        return None
    if key is None:
        raise ValueError(
            f"the model trains with dropout (hidden {config.hidden_dropout}, attention "
            f"{config.attention_dropout}) or a router that draws, so forward needs a dropout_key "
            f"with the seed and the samples' numbers. Pass one, or call eval()."
        )
    return key


def drop(x: Tensor, context: Context, *, layer: int, site: Site, probability: float) -> Tensor:
    """Drop parts of the residual stream's input [b, s, h]."""
    if context.dropout is None or probability == 0.0:
        return x
    keep = [
        keep_mask(
            context.dropout,
            layer=layer,
            site=site,
            probability=probability,
            heads=range(1),
            rows=rows,
            columns=range(x.size(-1)),
        )[:, 0]
        for rows in context.rows
    ]
    return dropout(x, torch.cat(keep, dim=1), probability=probability)


def _run(layers: list[nn.Module], hidden: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
    costs = []
    for layer in layers:
        hidden, cost = layer(hidden, context)
        costs.append(cost)
    return hidden, _total(costs)


def _total(costs: list[Tensor | None]) -> Tensor | None:
    known = [cost for cost in costs if cost is not None]
    return torch.stack(known).sum(0) if known else None
