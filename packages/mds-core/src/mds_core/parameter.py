"""What a layer says about each of its parameters, and what follows from it: start values, shards.

A layer declares a parameter once: its global shape, the part this rank holds and how it starts.
Initialisation and checkpoints read the declaration; no table of names repeats it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mds_core.init import normal
from mds_core.sharding import ParameterShard

__all__ = ["Declaration", "ParallelModule", "initialize", "parameter_shards", "split_evenly"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """One parameter of a layer.

    Attributes:
        global_shape: Shape over all ranks, with the true vocabulary.
        dim: The split dimension, None if every rank holds all of it.
        ranges: This rank's global ranges along ``dim``.
        padding: Rows after the ranges that are no part of the model; they stay zero.
        std: Standard deviation of the start values; None starts at ``fill`` everywhere.
        fill: Constant start value.
    """

    global_shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    padding: int = 0
    std: float | None = None
    fill: float = 0.0

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        if self.dim is None:
            return self.global_shape
        shape = list(self.global_shape)
        shape[self.dim] = sum(high - low for low, high in self.ranges) + self.padding
        return tuple(shape)


class ParallelModule(nn.Module):
    """A layer whose parameters carry declarations."""

    def __init__(self) -> None:
        super().__init__()
        self.declarations: dict[str, Declaration] = {}

    def declare(
        self,
        name: str,
        declaration: Declaration,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> nn.Parameter:
        """Register a parameter of the declared local shape; its values come with `initialize`."""
        values = torch.empty(declaration.local_shape, dtype=dtype, device=device)
        parameter = nn.Parameter(values)
        self.declarations[name] = declaration
        self.register_parameter(name, parameter)
        return parameter


def split_evenly(
    extent: int, *, rank: int, size: int, blocks: int = 1
) -> tuple[tuple[int, int], ...]:
    """This rank's range of each of ``blocks`` equal blocks that make up ``extent``."""
    width, rest = divmod(extent, blocks * size)
    if rest:
        raise ValueError(
            f"an extent of {extent} does not divide into {size} tensor-parallel slices of {blocks} "
            f"blocks; choose a multiple of {blocks * size}."
        )
    return tuple(
        ((block * size + rank) * width, (block * size + rank + 1) * width)
        for block in range(blocks)
    )


def parameter_shards(module: nn.Module) -> dict[str, ParameterShard]:
    """What this rank holds of each parameter of ``module``, by canonical name."""
    return {
        name: ParameterShard(
            name=name,
            global_shape=declaration.global_shape,
            local_shape=declaration.local_shape,
            dim=declaration.dim,
            ranges=declaration.ranges,
        )
        for name, declaration, _ in _declared(module)
    }


@torch.no_grad()
def initialize(module: nn.Module, *, seed: int, only: Collection[str] | None = None) -> None:
    """Give declared parameters their start values, which depend on seed and name only.

    Args:
        module: The model or a part of it.
        seed: The run's.
        only: Names of those that are to begin anew; all if None.
    """
    for name, declaration, parameter in _declared(module):
        if only is not None and name not in only:
            continue
        if declaration.std is None:
            parameter.fill_(declaration.fill)
        else:
            _fill_normal(parameter, name, declaration, seed=seed, std=declaration.std)


def _fill_normal(
    parameter: Tensor, name: str, declaration: Declaration, *, seed: int, std: float
) -> None:
    parameter.zero_()
    dim, begin = declaration.dim or 0, 0
    shape = declaration.global_shape
    ranges = ((0, shape[0]),) if declaration.dim is None else declaration.ranges
    for low, high in ranges:
        if high == low:
            continue
        box = tuple((low, high) if i == dim else (0, extent) for i, extent in enumerate(shape))
        values = normal(
            seed,
            name,
            global_shape=shape,
            box=box,
            std=std,
            dtype=parameter.dtype,
            device=parameter.device,
        )
        parameter.narrow(dim, begin, high - low).copy_(values)
        begin += high - low


def _declared(module: nn.Module) -> Iterator[tuple[str, Declaration, nn.Parameter]]:
    for path, child in module.named_modules():
        if isinstance(child, ParallelModule):
            for name, declaration in child.declarations.items():
                full = f"{path}.{name}" if path else name
                yield full, declaration, child.get_parameter(name)
