"""Linear layers whose weight is split over tensor-parallel ranks.

Shapes: ``b`` micro batch, ``s`` sequence, ``t`` tensor-parallel size. With sequence parallelism the
tensors outside a column/row pair hold ``s / t`` positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import copy, reduce, reduce_scatter
from mds_core.config.adapters import AdapterConfig
from mds_core.groups import group_rank, group_size
from mds_core.layers.lora import Adapter, AdapterDropout, AdapterPlace
from mds_core.layers.product import Multiply, product
from mds_core.parameter import Declaration, ParallelModule, split_evenly
from mds_core.rng import Site

__all__ = ["ColumnParallelLinear", "ReplicatedLinear", "RowParallelLinear"]

_SEQUENCE = 1  # dimension of the positions in [b, s, ...]


class _AdaptedLinear(ParallelModule):
    """A split linear layer that may have a low-rank adapter beside it."""

    def __init__(self, *, tp: ProcessGroup | None, sequence_parallel: bool) -> None:
        super().__init__()
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.multiply: Multiply = product
        """The product; a pipeline schedule puts one here whose weight gradient waits."""
        self.adapter: Adapter | None = None

    def add_adapter(self, config: AdapterConfig, *, layer: int, site: Site) -> None:
        """Put an adapter beside this layer.

        Args:
            config: Of the adapter.
            layer: Number of the transformer layer that this is in.
            site: Name of this linear layer there.
        """
        weight, declared = self.get_parameter("weight"), self.declarations["weight"]
        outputs, inputs = declared.global_shape
        assert declared.dim is not None
        place = AdapterPlace(
            layer=layer,
            site=site,
            inputs=inputs,
            outputs=outputs,
            dim=declared.dim,
            ranges=declared.ranges,
            tp=self.tp,
            sequence_parallel=self.sequence_parallel,
        )
        self.adapter = Adapter(config, place, dtype=weight.dtype, device=weight.device)

    def _adapted(self, y: Tensor, x: Tensor, dropping: AdapterDropout | None) -> Tensor:
        return y if self.adapter is None else y + self.adapter(x, dropping)


class ColumnParallelLinear(_AdaptedLinear):
    """``y = x W^T + b`` with the outputs split: each rank computes its own columns of y.

    Args:
        in_features: Width of the input.
        out_features: Width of the output over all ranks.
        tp: Ranks that share the layer; None for one.
        bias: Whether to add a bias.
        std: Standard deviation of the first weights.
        blocks: Equal blocks that make up the output ([gate; up] has two); every rank holds its
            slice of each.
        rows: This rank's ranges of the output, where they are others; as many rows on every rank.
        sequence_parallel: The input holds this rank's positions only and is gathered first, once
            more in the backward pass: only the own positions are kept for it.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: ProcessGroup | None = None,
        bias: bool = True,
        std: float = 0.02,
        blocks: int = 1,
        rows: tuple[tuple[int, int], ...] | None = None,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tp=tp, sequence_parallel=sequence_parallel)
        rank, size = group_rank(tp), group_size(tp)
        ranges = rows or split_evenly(out_features, rank=rank, size=size, blocks=blocks)
        weight = Declaration(
            global_shape=(out_features, in_features), dim=0, ranges=ranges, std=std
        )
        self.weight = self.declare("weight", weight, dtype=dtype, device=device)
        self.bias: nn.Parameter | None
        if bias:
            declaration = Declaration(global_shape=(out_features,), dim=0, ranges=ranges)
            self.bias = self.declare("bias", declaration, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, dropping: AdapterDropout | None = None) -> Tensor:
        """Return this rank's columns.

        Args:
            x: [b, s, in], or [b, s / t, in] with sequence parallelism.
            dropping: The dropout of an adapter.

        Returns:
            [b, s, out / t].
        """
        if self.sequence_parallel:
            y = self.multiply(x, self.weight, self.bias, group=self.tp)
        else:
            y = self.multiply(copy(x, group=self.tp), self.weight, self.bias)
        return self._adapted(y, x, dropping)


class RowParallelLinear(_AdaptedLinear):
    """``y = x W^T + b`` with the inputs split: the ranks' products are summed.

    Args:
        in_features: Width of the input over all ranks.
        out_features: Width of the output.
        tp: Ranks that share the layer; None for one.
        bias: Whether to add a bias; it is added once, after the sum.
        std: Standard deviation of the first weights.
        sequence_parallel: The output keeps this rank's positions only.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: ProcessGroup | None = None,
        bias: bool = True,
        std: float = 0.02,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tp=tp, sequence_parallel=sequence_parallel)
        ranges = split_evenly(in_features, rank=group_rank(tp), size=group_size(tp))
        weight = Declaration(
            global_shape=(out_features, in_features), dim=1, ranges=ranges, std=std
        )
        self.weight = self.declare("weight", weight, dtype=dtype, device=device)
        self.bias: nn.Parameter | None
        if bias:
            declaration = Declaration(global_shape=(out_features,))
            self.bias = self.declare("bias", declaration, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor, dropping: AdapterDropout | None = None) -> Tensor:
        """Return the sum over the ranks.

        Args:
            x: [b, s, in / t], this rank's slice.
            dropping: The dropout of an adapter.

        Returns:
            [b, s, out], or [b, s / t, out] with sequence parallelism.
        """
        return self._adapted(self._summed(x), x, dropping)

    def _summed(self, x: Tensor) -> Tensor:
        if self.tp is None:
            return self.multiply(x, self.weight, self.bias)
        y = self.multiply(x, self.weight, None)
        bias = self.bias
        if not self.sequence_parallel:
            y = reduce(y, group=self.tp)
            return y if bias is None else y + bias
        y = reduce_scatter(y, group=self.tp, dim=_SEQUENCE)
        # Each rank adds the bias to its own positions, so its gradient is a partial sum.
        return y if bias is None else y + copy(bias, group=self.tp)


class ReplicatedLinear(ParallelModule):
    """``y = x W^T + b``, the whole of it on every rank.

    Args:
        in_features: Width of the input.
        out_features: Width of the output.
        std: Standard deviation of the first weights.
        partial_over: Ranks that each give it their own positions.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float = 0.02,
        partial_over: ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.partial_over = partial_over
        weight = Declaration(global_shape=(out_features, in_features), std=std)
        self.weight = self.declare("weight", weight, dtype=dtype, device=device)
        bias = Declaration(global_shape=(out_features,))
        self.bias = self.declare("bias", bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        weight = copy(self.weight, group=self.partial_over)
        return F.linear(x, weight, copy(self.bias, group=self.partial_over))
