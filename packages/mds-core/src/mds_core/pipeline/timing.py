"""What each layer of a model takes on this machine, so that stages can be cut by time.

Shapes: ``b`` micro batch, ``s`` sequence, ``h`` hidden.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mds_core.config import Execution, GPTConfig
from mds_core.groups import ProcessGroups
from mds_core.partition import Stage, stages_of
from mds_core.pipeline.kinds import part_of
from mds_core.pipeline.part import Part

__all__ = ["layer_seconds"]


def layer_seconds(
    config: GPTConfig,
    groups: ProcessGroups,
    batch: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    execution: Execution | None = None,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Measure forward and backward of every layer; all ranks of the layout call it alike.

    Each kind of layer runs once to warm up and ``repeats`` times for the median; one layer's
    parameters are held at a time. The embedding is part of the layer behind it, the head part of
    the last one. Where ranks differ the slowest counts, so all get the same numbers.

    Args:
        config: Shape of the model.
        groups: The layout's ranks.
        batch: One micro batch: ``tokens``, ``labels`` and what else the model needs, as for
            `Pipeline.step`, on the device to measure; ``samples`` if the model has dropout.
        dtype: Of parameters and activations.
        execution: How to compute.
        repeats: Measurements of each kind of layer.
        clock: Tells the time in seconds.

    Returns:
        The costs of all layers, for `mds_core.partition.balance`.
    """
    kind, inputs = part_of(config), dict(batch)
    tokens, samples = inputs.pop("tokens"), inputs.pop("samples", None)
    shared = kind.prepared(tokens, inputs)
    if samples is not None:
        shared["samples"] = samples
    known: dict[object, float] = {}
    costs = []
    for stage in stages_of([1] * config.stacked_layers):
        part = kind.build(
            config,
            groups,
            splits=False,
            stage=stage,
            dtype=dtype,
            device="meta",
            execution=execution,
        )
        arriving = _arriving(part, stage, tokens, shared, dtype=dtype, width=config.hidden_size)
        key = (stage.first, stage.last, arriving.shape, *(p.shape for p in part.parameters()))
        if key not in known:
            _make_real(part.model, device=tokens.device)
            runs = [_run(part, arriving, shared, clock=clock) for _ in range(1 + repeats)]
            known[key] = statistics.median(runs[1:])
        costs.append(known[key])
    return _slowest(costs, groups, device=tokens.device)


def _arriving(
    part: Part,
    stage: Stage,
    tokens: Tensor,
    shared: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    width: int,
) -> Tensor:
    """What the stage gets: tokens, or hidden states [b, s, h]."""
    if stage.first:
        return tokens
    positions = part.passed(stage.layers.start, tokens=tokens, batch=shared)
    shape = (tokens.size(0), positions // part.held.sequence_shares, width)
    return torch.randn(shape, dtype=dtype, device=tokens.device).requires_grad_()


def _make_real(model: nn.Module, *, device: torch.device) -> None:
    """Give parameters memory and plain random numbers; the start values take longer to compute."""
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)


def _run(
    part: Part, arriving: Tensor, shared: Mapping[str, Any], *, clock: Callable[[], float]
) -> float:
    part.zero_grad()
    part.begin((1.0,) * part.terms(shared))
    start = _now(arriving.device, clock=clock)
    leaving = part(arriving, **shared)
    torch.autograd.backward(leaving, torch.ones_like(leaving))
    return _now(arriving.device, clock=clock) - start


def _now(device: torch.device, *, clock: Callable[[], float]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()


def _slowest(
    costs: list[float], groups: ProcessGroups, *, device: torch.device
) -> tuple[float, ...]:
    found = torch.tensor(costs, dtype=torch.float64, device=device)
    if groups.layout.world_size > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return tuple(found.tolist())
