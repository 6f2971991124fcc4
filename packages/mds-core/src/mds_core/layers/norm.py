"""Layer normalisation, with and without centring."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import copy
from mds_core.config import Normalization
from mds_core.parameter import Declaration, ParallelModule

__all__ = ["Norm"]


class Norm(ParallelModule):
    """LayerNorm or RMSNorm over the last dimension.

    Args:
        width: Extent of the last dimension.
        kind: ``layernorm`` centres and has a bias, ``rmsnorm`` neither.
        epsilon: Added to the variance.
        zero_centered: The stored weight is the factor minus one.
        partial_over: Ranks that each normalise another part of the data (heads, or positions with
            sequence parallelism) with the same weight, so that its gradients are to be summed.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        width: int,
        *,
        kind: Normalization = "layernorm",
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        partial_over: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.epsilon, self.zero_centered = kind, epsilon, zero_centered
        self.partial_over = partial_over
        factor = Declaration(global_shape=(width,), fill=0.0 if zero_centered else 1.0)
        self.weight = self.declare("weight", factor, dtype=dtype, device=device)
        self.bias: nn.Parameter | None
        if kind == "layernorm":
            shift = Declaration(global_shape=(width,))
            self.bias = self.declare("bias", shift, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``; shape and dtype stay."""
        weight = copy(self.weight, group=self.partial_over)
        weight = weight + 1.0 if self.zero_centered else weight
        if self.bias is None:
            # torch has no fused kernel for two dtypes, which autocast would bring together here.
            return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.epsilon)
        bias = copy(self.bias, group=self.partial_over)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
