"""What stands behind a BERT's layers: the way to the words' scores, and the vector of a sample.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mds_core.collectives import gather
from mds_core.layers.linear import ReplicatedLinear
from mds_core.layers.mlp import ACTIVATIONS
from mds_core.models.block import Build

__all__ = ["Pooler", "WordTransform"]


class Pooler(nn.Module):
    """Make one vector of a sample from its first token, the same on all tensor-parallel ranks."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        # With sequence parallelism the first position is the first rank's.
        self.holders = build.tp if build.execution.sequence_parallel else None
        self.dense = _square(build, partial_over=None)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map this rank's positions [b, s, h] to [b, h]."""
        first = gather(hidden[:, :1], group=self.holders, dim=1)[:, 0]
        return self.dense(first).tanh()  # type: ignore[no-any-return]


class WordTransform(nn.Module):
    """What stands between the encoder and the product with the words' vectors."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[build.config.activation]
        own_positions = build.tp if build.execution.sequence_parallel else None
        self.dense = _square(build, partial_over=own_positions)
        self.layer_norm = build.norm()

    def forward(self, hidden: Tensor) -> Tensor:
        """Map this rank's positions [b, s, h] to [b, s, h]."""
        return self.layer_norm(self.activation(self.dense(hidden)))  # type: ignore[no-any-return]


def _square(build: Build, *, partial_over: ProcessGroup | None) -> ReplicatedLinear:
    size = build.config.hidden_size
    return ReplicatedLinear(
        size,
        size,
        std=build.config.init_std,
        partial_over=partial_over,
        dtype=build.dtype,
        device=build.device,
    )
