"""Low-rank adapters beside split linear layers (LoRA, Hu et al. 2021): ``y = W x + scale B A x``.

``linear_in`` is A, ``linear_out`` is B. Beside a layer with split outputs B is split and A is
whole, beside one with split inputs A is split and B is whole. What is sent between the ranks is the
narrow tensor of the rank's width, never a wide one.

Shapes: ``b`` micro batch, ``s`` sequence, ``r`` rank of the adapter, ``t`` tensor-parallel size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from mds_core.collectives import copy, gather_partial, reduce, reduce_scatter
from mds_core.config.adapters import AdapterConfig
from mds_core.parameter import Declaration, ParallelModule
from mds_core.rng import DropoutKey, Site, dropout, keep_mask

__all__ = ["Adapter", "AdapterDropout", "AdapterPlace"]

_SEQUENCE = 1  # dimension of the positions in [b, s, ...]


class AdapterDropout(NamedTuple):
    """What makes the adapters' dropout of one forward pass: key, and which positions are here."""

    key: DropoutKey
    stream: tuple[range, ...]
    """Positions of the residual stream, which the layers with split outputs read."""
    between: tuple[range, ...]
    """Positions between such a layer and the one with split inputs behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPlace:
    """Where an adapter stands: the layer that it is beside.

    Attributes:
        layer: Number of the transformer layer, for dropout.
        site: Name of the linear layer.
        inputs: Inputs over all ranks.
        outputs: Outputs over all ranks.
        dim: 0 if the outputs are split, 1 if the inputs are.
        ranges: This rank's ranges of them.
        tp: Ranks that share the layer; None for one.
        sequence_parallel: Outside of the layer each rank holds its positions only.
    """

    layer: int
    site: Site
    inputs: int
    outputs: int
    dim: int
    ranges: tuple[tuple[int, int], ...]
    tp: ProcessGroup | None
    sequence_parallel: bool

    @property
    def columns(self) -> range:
        """The inputs that this rank has."""
        return range(self.inputs) if self.dim == 0 else range(*self.ranges[0])


class _Factor(ParallelModule):
    """A or B."""

    def __init__(
        self, declaration: Declaration, *, dtype: torch.dtype, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.weight = self.declare("weight", declaration, dtype=dtype, device=device)


class Adapter(ParallelModule):
    """What is added to one linear layer; nothing at first, since B starts at zero.

    Args:
        config: Of all adapters.
        place: The layer that it is beside.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        config: AdapterConfig,
        place: AdapterPlace,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.place, self.scale, self.probability = place, config.scale, config.dropout
        # The variance that nn.Linear starts with, as usual for adapters.
        first = Declaration(
            global_shape=(config.rank, place.inputs),
            dim=1 if place.dim == 1 else None,
            ranges=place.ranges if place.dim == 1 else (),
            std=1.0 / math.sqrt(3.0 * place.inputs),
        )
        second = Declaration(
            global_shape=(place.outputs, config.rank),
            dim=0 if place.dim == 0 else None,
            ranges=place.ranges if place.dim == 0 else (),
        )
        self.linear_in = _Factor(first, dtype=dtype, device=device)
        self.linear_out = _Factor(second, dtype=dtype, device=device)

    def forward(self, x: Tensor, dropping: AdapterDropout | None = None) -> Tensor:
        """Map the layer's input to what is added to its output, in the shapes that these have."""
        a, b = self.linear_in.weight, self.linear_out.weight
        x = self._dropped(x, dropping)
        return self._narrow_and_widen(x, a, b) * self.scale

    def _narrow_and_widen(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        tp, positions = self.place.tp, self.place.sequence_parallel and self.place.tp is not None
        if self.place.dim == 0:
            if not positions:
                # Each rank widens to other outputs, so the narrow gradient is a sum over them.
                return F.linear(copy(F.linear(x, a), group=tp), b)
            # A sees this rank's positions only: its gradient is a partial sum.
            narrow = F.linear(x, copy(a, group=tp))
            return F.linear(gather_partial(narrow, group=tp, dim=_SEQUENCE), b)
        narrow = F.linear(x, a)
        if not positions:
            return F.linear(reduce(narrow, group=tp), b)
        return F.linear(reduce_scatter(narrow, group=tp, dim=_SEQUENCE), copy(b, group=tp))

    def _dropped(self, x: Tensor, dropping: AdapterDropout | None) -> Tensor:
        if dropping is None or not self.training or self.probability == 0.0:
            return x
        place = self.place
        stretches = dropping.stream if place.dim == 0 else dropping.between
        keep = [
            keep_mask(
                dropping.key,
                layer=place.layer,
                site=place.site,
                probability=self.probability,
                heads=range(1),
                rows=rows,
                columns=place.columns,
            )[:, 0]
            for rows in stretches
        ]
        return dropout(x, torch.cat(keep, dim=1), probability=self.probability)
