"""Pipeline runs for parity tests, imported by the tests and their ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from core_cells import AdamW, Cell, Trace, whole

from mds_core.groups import Layout, ProcessGroups
from mds_core.partition import stages_of
from mds_core.pipeline import Pipeline

ROWS, LENGTH = 8, 16


@dataclass(frozen=True, kw_only=True)
class PipelineCell:
    """One pipeline run of a model cell."""

    cell: Cell
    schedule: str = "1f1b"
    sizes: tuple[int, ...] | None = None
    micro_batches: int = 4
    lengths: tuple[int, ...] = (LENGTH, LENGTH, LENGTH)
    """Sequence length of each step."""


def big_batch(config, step: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(500 + step)
    window = torch.randint(0, config.vocab_size, (ROWS, length + 1), generator=generator)
    return {
        "tokens": window[:, :-1],
        "labels": window[:, 1:],
        "loss_mask": (torch.rand(ROWS, length, generator=generator) > 0.2).double(),
        "samples": torch.arange(ROWS) + ROWS * step,
        "cumulative_lengths": torch.tensor([0, 5, *range(length, ROWS * length + 1, length)]),
    }


def train_pipeline(pipeline_cell: PipelineCell, layout: Layout) -> dict:
    """Steps of plain AdamW; returns the losses and this rank's stages, joined over tp."""
    cell = pipeline_cell.cell
    sizes = pipeline_cell.sizes
    pipeline = Pipeline(
        cell.config,
        ProcessGroups.build(layout),
        micro_batches=pipeline_cell.micro_batches,
        schedule=pipeline_cell.schedule,
        stages=None if sizes is None else stages_of(sizes),
        seed=7,
        dtype=cell.dtype,
        execution=cell.execution,
    )
    parameters = pipeline.canonical_parameters()
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.mul_(cell.std_factor if parameter.dim() > 1 else 1.0)
    optimizer = AdamW(parameters.values())
    trace = Trace(losses=[], gradients=[], parameters=[])
    for step, length in enumerate(pipeline_cell.lengths):
        batch = big_batch(cell.config, step, length)
        pipeline.zero_grad()
        count = batch["loss_mask"].sum()
        loss = pipeline.step(**batch, scale=1 / count)
        trace.losses.append((loss.loss_sum / count).item())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        trace.gradients.append(whole(pipeline, gradients))
        optimizer.step()
        trace.parameters.append(whole(pipeline, parameters))
    del batch["samples"]
    evaluated = pipeline.eval().evaluate(**batch)
    return {
        "trace": trace,
        "copies": pipeline.copies,
        "evaluated": evaluated.loss_sum.item(),
        "losses": evaluated.losses,
    }


def train_pipelines(cells: dict[str, PipelineCell], layout: Layout) -> dict[str, dict]:
    """Several runs in the same processes."""
    return {name: train_pipeline(cell, layout) for name, cell in cells.items()}


def joined(ranks: list[dict]) -> Trace:
    """One trace of all stages; a copied table must be the original to the bit."""
    first = ranks[0]["trace"]
    steps = range(len(first.losses))
    trace = Trace(
        losses=first.losses, gradients=[{} for _ in steps], parameters=[{} for _ in steps]
    )
    for rank in ranks:
        assert rank["trace"].losses == first.losses
        for kind in ("gradients", "parameters"):
            for step in steps:
                for name, tensor in getattr(rank["trace"], kind)[step].items():
                    known = getattr(trace, kind)[step].setdefault(name, tensor)
                    assert torch.equal(known, tensor), f"{name} differs between ranks"
    return trace
