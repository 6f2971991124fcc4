"""Pipeline runs for parity tests, imported by the tests and their ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.distributed as dist
from core_cells import (
    BERT,
    BLOOM,
    DROPPING,
    GPT2,
    LLAMA_GQA,
    MIXTRAL,
    T5_SHAPE,
    AdamW,
    Cell,
    Trace,
    give_adapters_effect,
    sum_gradients,
    whole,
)
from torch.distributed.pipelining import PipelineStage
from torch.utils.flop_counter import FlopCounterMode

from mds_core.bert_config import BertConfig
from mds_core.config import Execution, GPTConfig
from mds_core.config.adapters import AdapterConfig
from mds_core.config.distillation import Distillation
from mds_core.groups import Layout, ProcessGroups
from mds_core.partition import stages_of
from mds_core.pipeline import SCHEDULES, Pipeline
from mds_core.t5_config import T5Config

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
    taught: bool = False
    """Learn from a teacher, too."""
    broken: bool = False
    """Leave out the sum of a tied table's gradients over its stages."""


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
DEEP_BERT = replace(BERT, num_layers=4, **DROPPING)
DEEP_T5 = replace(T5_SHAPE, num_layers=3, decoder_num_layers=2, embedding_norm=True, **DROPPING)
ONCE = (LENGTH,)
FAMILIES = {
    "bert-1f1b": PipelineCell(cell=Cell(config=DEEP_BERT), lengths=ONCE),
    "bert-zb-v": PipelineCell(
        cell=Cell(config=replace(DEEP_BERT, binary_head=False)), schedule="zb-v", lengths=ONCE
    ),
    "t5-1f1b": PipelineCell(cell=Cell(config=DEEP_T5), sizes=(3, 2), lengths=(LENGTH, 12)),
    "t5-zb-h1": PipelineCell(
        cell=Cell(config=DEEP_T5, execution=Execution(recompute="full")),
        schedule="zb-h1",
        sizes=(4, 1),
        lengths=ONCE,
    ),
    "t5-interleaved": PipelineCell(
        cell=Cell(config=DEEP_T5), schedule="interleaved-1f1b", sizes=(2, 1, 1, 1), lengths=ONCE
    ),
}
ADAPTERS = AdapterConfig(rank=2, alpha=5.0, dropout=0.1)
LORA = {
    f"lora-{schedule}": PipelineCell(
        cell=Cell(config=DEEP, adapters=ADAPTERS), schedule=schedule, lengths=ONCE
    )
    for schedule in SCHEDULES
}
LORA["lora-zb-h1"] = PipelineCell(
    cell=Cell(
        config=DEEP_LLAMA,
        execution=Execution(recompute="full"),
        adapters=replace(ADAPTERS, targets=("linear_proj", "linear_fc1")),
    ),
    schedule="zb-h1",
)
"""The parameters rest; what their stages compute for them in the weight pass is nothing."""
TEACHER = replace(GPT2, num_layers=5, hidden_size=24, num_attention_heads=2)
DISTILLATION = Distillation(alpha=0.7, beta=2.0, temperature=1.5)
TAUGHT = {
    "taught-zb-h1": PipelineCell(cell=Cell(config=DEEP), schedule="zb-h1", taught=True),
    "taught-experts-zb-v": PipelineCell(
        cell=Cell(config=replace(MIXTRAL, vocab_size=96, num_layers=4)),
        schedule="zb-v",
        lengths=ONCE,
        taught=True,
    ),
}
CELLS |= FAMILIES | LORA | TAUGHT
PP4 = {
    "pp4-t5": PipelineCell(cell=Cell(config=DEEP_T5), sizes=(2, 1, 1, 1), lengths=ONCE),
    "pp4-t5-zb-v": PipelineCell(
        cell=Cell(config=replace(DEEP_T5, num_layers=5, decoder_num_layers=4)),
        schedule="zb-v",
        sizes=(1, 1, 1, 1, 2, 1, 1, 1),
        lengths=ONCE,
    ),
}
"""The decoder begins on a rank that has no head."""
TP2 = {
    "tp2-bert-1f1b": PipelineCell(
        cell=Cell(config=DEEP_BERT, execution=Execution(sequence_parallel=True)), lengths=ONCE
    ),
    "tp2-t5-zb-h1-lazy": PipelineCell(
        cell=Cell(config=DEEP_T5, execution=Execution(sequence_parallel=True)),
        schedule="zb-h1-lazy",
        lengths=ONCE,
    ),
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
TP2["tp2-taught-1f1b"] = PipelineCell(
    cell=Cell(config=DEEP, execution=Execution(sequence_parallel=True)), lengths=ONCE, taught=True
)
TP2["tp2-lora-zb-v"] = PipelineCell(
    cell=Cell(config=DEEP, execution=Execution(sequence_parallel=True), adapters=ADAPTERS),
    schedule="zb-v",
    lengths=ONCE,
)
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
    tokens, labels = window[:, :-1], window[:, 1:]
    batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": (torch.rand(ROWS, length, generator=generator) > 0.2).double(),
        "samples": torch.arange(ROWS) + ROWS * step,
    }
    if not isinstance(config, (BertConfig, T5Config)):
        bounds = torch.tensor([0, 5, *range(length, ROWS * length + 1, length)])
        return batch | {"cumulative_lengths": bounds}
    batch["padding_mask"] = torch.arange(length) < length - torch.arange(ROWS)[:, None] % 4
    if isinstance(config, T5Config):
        half = length // 2
        batch["decoder_tokens"] = labels[:, :half]
        batch["labels"] = labels[:, 1 : half + 1]
        batch["loss_mask"] = batch["loss_mask"][:, :half]
        return batch
    if config.binary_head:
        batch["binary_labels"] = labels[:, 0] % 2
    return batch | {"token_types": (labels > 40).long()}


def mean_loss(found, count: torch.Tensor) -> torch.Tensor:
    """Of what a model or a pipeline gives: a mean over words, and over samples if judged."""
    binary_sum = getattr(found, "binary_sum", None)
    mean = found.loss_sum / count
    return mean if binary_sum is None else mean + binary_sum / ROWS


def own_share(batch: dict[str, torch.Tensor], groups: ProcessGroups) -> dict[str, torch.Tensor]:
    """The rows that a data-parallel rank sees, and the bounds of their documents."""
    rows, length = batch["tokens"].shape
    share = rows // groups.dp_size
    own = slice(groups.dp_rank * share, (groups.dp_rank + 1) * share)
    rows_of = {name: x[own] for name, x in batch.items() if name != "cumulative_lengths"}
    if "cumulative_lengths" not in batch:
        return rows_of
    bounds = batch["cumulative_lengths"] - own.start * length
    return rows_of | {"cumulative_lengths": bounds.clamp(0, share * length).unique()}


def build_pipeline(pipeline_cell: PipelineCell, groups: ProcessGroups) -> Pipeline:
    cell, sizes = pipeline_cell.cell, pipeline_cell.sizes
    return Pipeline(
        cell.config,
        groups,
        micro_batches=pipeline_cell.micro_batches,
        schedule=pipeline_cell.schedule,
        stages=None if sizes is None else stages_of(sizes),
        seed=7,
        dtype=cell.dtype,
        execution=cell.execution,
        grad_dtype=pipeline_cell.grad_dtype,
        adapters=cell.adapters,
    )


def with_teacher(pipeline: Pipeline, pipeline_cell: PipelineCell) -> None:
    """Give it a teacher of another shape on the same stages."""
    config = teacher_of(pipeline_cell.cell.config)
    cell = Cell(config=config, execution=pipeline_cell.cell.execution)
    like = replace(pipeline_cell, cell=cell, sizes=None)
    teacher = build_pipeline(like, pipeline.groups)
    enlarge(teacher.canonical_parameters())
    pipeline.set_teacher(teacher, DISTILLATION)


def teacher_of(config: GPTConfig) -> GPTConfig:
    """A teacher's shape with a student's vocabulary and padding."""
    return replace(TEACHER, make_vocab_size_divisible_by=config.make_vocab_size_divisible_by)


@torch.no_grad()
def enlarge(parameters: dict[str, torch.nn.Parameter], *, factor: float = 5.0) -> None:
    """Start from larger matrices than usual, adapters excepted, as `core_cells.build` does."""
    for name, parameter in parameters.items():
        if ".adapter." not in name and parameter.dim() > 1:
            parameter.mul_(factor)


def train_pipeline(pipeline_cell: PipelineCell, groups: ProcessGroups) -> dict:
    """Steps of plain AdamW; returns the losses and this rank's stages, joined over tp."""
    cell = pipeline_cell.cell
    pipeline = build_pipeline(pipeline_cell, groups)
    if pipeline_cell.broken:
        pipeline._shared.sum_gradients = lambda: None
    parameters = pipeline.canonical_parameters()
    enlarge(parameters, factor=cell.std_factor)
    if pipeline_cell.taught:
        with_teacher(pipeline, pipeline_cell)
    if cell.adapters is not None:
        give_adapters_effect(pipeline.parameter_shards(), parameters)
        parameters = {name: each for name, each in parameters.items() if each.requires_grad}
    optimizer = AdamW(parameters.values())
    trace = Trace(losses=[], gradients=[], parameters=[])
    for step, length in enumerate(pipeline_cell.lengths):
        batch = big_batch(cell.config, step, length)
        pipeline.zero_grad()
        count = batch["loss_mask"].sum()
        batch = own_share(batch, pipeline.groups)
        judged = "binary_labels" in batch
        loss = pipeline.step(**batch, scale=(1 / count, 1 / ROWS) if judged else 1 / count)
        sum_gradients(parameters, pipeline.groups, experts=pipeline.expert_parameters())
        mean = mean_loss(loss, count)
        if pipeline.groups.dp is not None:
            dist.all_reduce(mean, group=pipeline.groups.dp)
        trace.losses.append(mean.item())
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
        trace.gradients.append(whole(pipeline, gradients))
        optimizer.step()
        trace.parameters.append(whole(pipeline, parameters))
    del batch["samples"]
    evaluated = pipeline.eval().evaluate(**batch, micro_batches=2)
    return {
        "trace": trace,
        "copies": pipeline.copies,
        "evaluated": mean_loss(evaluated, count).item(),
        "losses": evaluated.losses,
    }


def train_pipelines(cells: dict[str, PipelineCell], layout: Layout) -> dict[str, dict]:
    """Several runs in the same processes."""
    groups = ProcessGroups.build(layout)  # once: gloo keeps the threads of every group
    return {name: train_pipeline(cell, groups) for name, cell in cells.items()}


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
    counts, groups = {}, ProcessGroups.build(layout)
    for recompute in ("none", "full", "modules"):
        for schedule in ("1f1b", "zb-h1"):
            listed = ("norm", "activation") if recompute == "modules" else ()
            execution = Execution(recompute=recompute, recompute_modules=listed)
            cell = Cell(config=DEEP, execution=execution)
            pipeline = build_pipeline(PipelineCell(cell=cell, schedule=schedule), groups)
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
    ran, groups = {}, ProcessGroups.build(layout)
    for name in SCHEDULES:
        pipeline = build_pipeline(CELLS[name], groups)
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
