"""A decoder's attention to what an encoder made of another sequence.

Shapes: ``b`` micro batch, ``q`` positions of the decoder, ``k`` of the encoder, ``h`` hidden, ``n``
query heads and ``g`` key/value heads of this rank, ``d`` head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.config import Execution, GPTConfig
from mds_core.groups import group_rank, group_size
from mds_core.init import scaled_std
from mds_core.layers.attention import AttentionCore, Context
from mds_core.layers.few_heads import key_value_rows, sharers, whole_heads
from mds_core.layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = ["CrossAttention"]


class CrossAttention(nn.Module):
    """Project the decoder to queries and the encoder to keys and values, attend, project back.

    The rows of ``linear_kv`` are grouped by head: its key, then its value.

    Args:
        config: Shape of the model.
        layer: Number that keys this layer's dropout.
        tp: Ranks that share the heads; None for one.
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
        execution: Execution | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        execution = execution or Execution()
        self.channels = config.channels
        self.tp, self.sharers = tp, sharers(config, tp)
        self.kv_heads = max(config.kv_heads // group_size(tp), 1)
        heads = config.num_attention_heads // group_size(tp)
        first = group_rank(tp) * heads
        self.core = AttentionCore(
            config,
            layer=layer,
            site="cross_attention",
            heads=range(first, first + heads),
            execution=execution,
        )
        queries = config.num_attention_heads * config.channels
        few = key_value_rows(config, tp) if self.sharers > 1 else None
        self.linear_q, self.linear_kv = (
            ColumnParallelLinear(
                config.hidden_size,
                width,
                tp=tp,
                bias=config.qkv_bias,
                std=config.init_std,
                rows=rows,
                sequence_parallel=execution.sequence_parallel,
                dtype=dtype,
                device=device,
            )
            for width, rows in ((queries, None), (2 * config.kv_heads * config.channels, few))
        )
        self.linear_proj = RowParallelLinear(
            queries,
            config.hidden_size,
            tp=tp,
            bias=config.add_bias,
            std=scaled_std(config.init_std, num_layers=config.num_layers),
            sequence_parallel=execution.sequence_parallel,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Map the decoder's [b, q, h] to [b, q, h], looking at ``context.memory``."""
        assert context.memory is not None, "a decoder layer needs the encoder's output"
        query = self.linear_q(x)
        query = query.view(*query.shape[:2], -1, self.channels).transpose(1, 2)
        pairs = self.linear_kv(context.memory.hidden)
        if self.tp is not None and self.sharers > 1:
            pairs = whole_heads(pairs, tp=self.tp, ranks=self.sharers)
        pairs = pairs.view(*pairs.shape[:2], self.kv_heads, 2, self.channels)
        key, value = (part.transpose(1, 2) for part in pairs.unbind(3))
        joined = self.core(query, key, value, context, mask=context.memory.mask)
        return self.linear_proj(joined)  # type: ignore[no-any-return]
