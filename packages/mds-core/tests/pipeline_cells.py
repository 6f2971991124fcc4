"""Pipeline runs for parity tests, imported by the tests and their ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist
from core_cells import BLOOM, GPT2, LLAMA_GQA, MIXTRAL, AdamW, Cell, Trace, sum_gradients, whole
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from mds_core.config import Execution
from mds_core.groups import Layout, ProcessGroups
from mds_core.partition import stages_of
from mds_core.pipeline import SCHEDULES, Pipeline

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
    grad_dtype: torch.dtype | None = None
    broken: bool = False
    """Leave out the sum of a tied table's gradients over its two stages."""


DEEP = replace(GPT2, num_layers=4, hidden_dropout=0.2)
DEEP_BLOOM = replace(BLOOM, num_layers=4, hidden_dropout=0.2)
DEEP_MIXTRAL = replace(MIXTRAL, num_layers=4)
DEEP_LLAMA = replace(LLAMA_GQA, num_layers=5)
CELLS = {name: PipelineCell(cell=Cell(config=DEEP), schedule=name) for name in SCHEDULES} | {
    "uneven": PipelineCell(cell=Cell(config=DEEP_LLAMA), sizes=(4, 1)),
    "uneven-zb-v": PipelineCell(cell=Cell(config=DEEP_LLAMA), schedule="zb-v", sizes=(1, 2, 1, 1)),
    "lengths": PipelineCell(cell=Cell(config=DEEP_BLOOM), lengths=(LENGTH, 10, LENGTH)),
    "experts": PipelineCell(cell=Cell(config=DEEP_MIXTRAL)),
    "experts-zb-v": PipelineCell(
        cell=Cell(config=DEEP_MIXTRAL, execution=Execution(recompute="full")), schedule="zb-v"
    ),
    "recompute-modules": PipelineCell(
        cell=Cell(
            config=DEEP,
            execution=Execution(recompute="modules", recompute_modules=("norm", "activation")),
        ),
        schedule="zb-h1",
    ),
    "recompute": PipelineCell(
        cell=Cell(config=DEEP, execution=Execution(recompute="full")), schedule="zb-h1"
    ),
}
TP2 = {
    "tp2-1f1b": PipelineCell(cell=Cell(config=DEEP, execution=Execution(sequence_parallel=True))),
    "tp2-zb-h1": PipelineCell(cell=Cell(config=DEEP_LLAMA), schedule="zb-h1", lengths=(LENGTH,)),
    "tp2-zb-h1-sequence-parallel-modules": PipelineCell(
        cell=Cell(
            config=DEEP,
            execution=Execution(
                sequence_parallel=True, recompute="modules", recompute_modules=("norm",)
            ),
        ),
        schedule="zb-h1",
        lengths=(LENGTH,),
    ),
}
ULYSSES = {
    "ring2-1f1b": PipelineCell(
        cell=Cell(
            config=DEEP_BLOOM, execution=Execution(sequence_sharing="ring", sequence_chunk=3)
        ),
        lengths=(LENGTH,),
    ),
    "ulysses2-zb-h1": PipelineCell(
        cell=Cell(config=DEEP_BLOOM), schedule="zb-h1", lengths=(LENGTH,)
    ),
}
HALF = PipelineCell(
    cell=Cell(config=DEEP_LLAMA, dtype=torch.bfloat16), schedule="zb-h1", lengths=(LENGTH,)
)
SUMS = {
    f"sums-{name}": replace(HALF, micro_batches=8, grad_dtype=dtype)
    for name, dtype in (("fp32", torch.float32), ("bf16", None))
}
UNSUMMED = PipelineCell(cell=Cell(config=DEEP), lengths=(LENGTH,), broken=True)
ALL = CELLS | {"unsummed": UNSUMMED, "half": HALF} | SUMS


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


def own_share(batch: dict[str, torch.Tensor], groups: ProcessGroups) -> dict[str, torch.Tensor]:
    """The rows that a data-parallel rank sees, and the bounds of their documents."""
    rows, length = batch["tokens"].shape
    share = rows // groups.dp_size
    own = slice(groups.dp_rank * share, (groups.dp_rank + 1) * share)
    bounds = batch["cumulative_lengths"] - own.start * length
    inside = bounds.clamp(0, share * length).unique()
    return {name: x[own] for name, x in batch.items() if name != "cumulative_lengths"} | {
        "cumulative_lengths": inside
    }


def build_pipeline(pipeline_cell: PipelineCell, layout: Layout) -> Pipeline:
    cell, sizes = pipeline_cell.cell, pipeline_cell.sizes
    return Pipeline(
        cell.config,
        ProcessGroups.build(layout),
        micro_batches=pipeline_cell.micro_batches,
        schedule=pipeline_cell.schedule,
        stages=None if sizes is None else stages_of(sizes),
        seed=7,
        dtype=cell.dtype,
        execution=cell.execution,
        grad_dtype=pipeline_cell.grad_dtype,
    )


def train_pipeline(pipeline_cell: PipelineCell, layout: Layout) -> dict:
    """Steps of plain AdamW; returns the losses and this rank's stages, joined over tp."""
    cell = pipeline_cell.cell
    pipeline = build_pipeline(pipeline_cell, layout)
    if pipeline_cell.broken:
        pipeline._sum_tied_gradients = lambda: None
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
        batch = own_share(batch, pipeline.groups)
        loss = pipeline.step(**batch, scale=1 / count)
        sum_gradients(parameters, pipeline.groups, experts=pipeline.expert_parameters())
        if pipeline.groups.dp is not None:
            dist.all_reduce(loss.loss_sum, group=pipeline.groups.dp)
        trace.losses.append((loss.loss_sum / count).item())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        trace.gradients.append(whole(pipeline, gradients))
        optimizer.step()
        trace.parameters.append(whole(pipeline, parameters))
    del batch["samples"]
    evaluated = pipeline.eval().evaluate(**batch, micro_batches=2)
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


def count_all(layout: Layout) -> dict[str, dict]:
    """Operations of the matrix products of a step, and gradients after one and two steps."""
    counts = {}
    for recompute in ("none", "full", "modules"):
        for schedule in ("1f1b", "zb-h1"):
            listed = ("norm", "activation") if recompute == "modules" else ()
            execution = Execution(recompute=recompute, recompute_modules=listed)
            cell = Cell(config=DEEP, execution=execution)
            pipeline = build_pipeline(PipelineCell(cell=cell, schedule=schedule), layout)
            batch = big_batch(DEEP, 0)
            with FlopCounterMode(display=False) as counter:
                pipeline.step(**batch)
            counts[f"{schedule}/{recompute}"] = counter.get_total_flops()
    table = pipeline.canonical_parameters()["embedding.word_embeddings.weight"]
    once = table.grad.clone()
    pipeline.step(**batch)
    return {"flops": counts, "accumulated": (once, table.grad)}


def ran_all(layout: Layout) -> dict[str, dict]:
    """The passes of one step of every schedule, as torch's stages really ran them."""
    ran = {}
    for name in SCHEDULES:
        pipeline = build_pipeline(CELLS[name], layout)
        steps: list[tuple[str, int, int]] = []
        with (
            mock.patch.object(PipelineStage, "forward_one_chunk", recorder(steps, "F")),
            mock.patch.object(PipelineStage, "backward_one_chunk", recorder(steps, "B")),
            mock.patch.object(PipelineStage, "backward_weight_one_chunk", recorder(steps, "W")),
        ):
            pipeline.step(**big_batch(DEEP, 0))
        ran[name] = steps
    return {"ran": ran}


def recorder(steps: list, kind: str):
    method = {
        "F": PipelineStage.forward_one_chunk,
        "B": PipelineStage.backward_one_chunk,
        "W": PipelineStage.backward_weight_one_chunk,
    }[kind]

    def record(self, chunk, *arguments, **options):
        split = kind == "B" and not options.get("full_backward", True)
        steps.append(("I" if split else kind, self.stage_index, chunk))
        return method(self, chunk, *arguments, **options)

    return record
