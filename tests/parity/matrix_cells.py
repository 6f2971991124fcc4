"""Which models the parity matrix trains on which layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import core_cells
import pipeline_cells
from core_cells import BERT, CELLS, DROPPING, GPT2, LLAMA_GQA, MIXTRAL, T5_SHAPE, Cell, Trace
from pipeline_cells import PipelineCell

from mds_core.config import Execution
from mds_core.groups import Layout
from mds_core.pipeline import SCHEDULES

LAYOUTS = {
    "tp2": Layout(tp_size=2),
    "tp4": Layout(tp_size=4),
    "dp2": Layout(dp_size=2),
    "ulysses2": Layout(ulysses_size=2),
    "ring2": Layout(ulysses_size=2),
    "ring4": Layout(ulysses_size=4),
    "ep2": Layout(dp_size=2, ep_size=2),
    "tp2dp2": Layout(tp_size=2, dp_size=2),
    "tp2ulysses2": Layout(tp_size=2, ulysses_size=2),
    "tp2ring2": Layout(tp_size=2, ulysses_size=2),
    "tp2ep2": Layout(tp_size=2, dp_size=2, ep_size=2),
    "ulysses2ep2": Layout(ulysses_size=2, dp_size=2, ep_size=2),
    "tp2ring2ep2": Layout(tp_size=2, ulysses_size=2, dp_size=2, ep_size=2),
}
PIPELINES = {
    "pp2": Layout(pp_size=2),
    "pp4": Layout(pp_size=4),
    "tp2pp2": Layout(tp_size=2, pp_size=2),
    "pp2ep2": Layout(pp_size=2, dp_size=2, ep_size=2),
    "ring2pp2": Layout(ulysses_size=2, pp_size=2),
    "tp2pp2dp2": Layout(tp_size=2, pp_size=2, dp_size=2),
}
EIGHT = {("gpt", "modules"), ("moe", "full"), ("llama", "plain"), ("t5", "full")}
"""Of a pipeline's models and policies those that eight ranks run."""
MODELS = [name for name in CELLS if not name.endswith("fp32") and "capacity" not in name]


def cells_of(layout: str) -> dict[str, Cell]:
    """The models that a layout can train, one step each."""
    sizes, found = LAYOUTS[layout], {}
    for name in MODELS:
        cell = CELLS[name]
        if sizes.ulysses_size > 1 and name.startswith(("bert", "t5")):
            continue
        if sizes.ep_size > 1 and not any(cell.config.experts):
            continue
        if "ring" in layout:
            cell = replace(cell, execution=replace(cell.execution, sequence_sharing="ring"))
        elif cell.config.num_attention_heads // sizes.tp_size < sizes.ulysses_size:
            continue
        if max(sizes.tp_size, cell.config.kv_heads) % min(sizes.tp_size, cell.config.kv_heads) == 0:
            found[name] = replace(cell, steps=1)
    return found


def pipelines_of(layout: str) -> dict[str, PipelineCell]:
    """Every schedule, plain and with recomputation, with and without dropout."""
    sizes, found = PIPELINES[layout], {}
    base = Execution(
        sequence_parallel=sizes.tp_size > 1,
        sequence_sharing="ring" if "ring" in layout else "ulysses",
    )
    modules = {"recompute": "modules", "recompute_modules": ("norm", "activation")}
    policies = {"plain": {}, "full": {"recompute": "full"}, "modules": modules}
    models = {
        "gpt": replace(GPT2, num_layers=8, **DROPPING),
        "llama": replace(LLAMA_GQA, num_layers=8),
        "moe": replace(MIXTRAL, num_layers=8),
        "bert": replace(BERT, num_layers=8, **DROPPING),
        "t5": replace(T5_SHAPE, num_layers=4, decoder_num_layers=5, **DROPPING),
    }
    for schedule in SCHEDULES:
        for model, config in models.items():
            for policy, options in policies.items():
                if sizes.ep_size > 1 and model != "moe":
                    continue
                if sizes.world_size == 8 and (model, policy) not in EIGHT:
                    continue
                if sizes.ulysses_size > 1 and model in ("bert", "t5"):
                    continue
                cell = Cell(config=config, execution=replace(base, **options))
                found[f"{schedule}/{model}/{policy}"] = PipelineCell(
                    cell=cell,
                    schedule=schedule,
                    micro_batches=8 if sizes.pp_size == 4 else 4,
                    lengths=(pipeline_cells.LENGTH,),
                )
    return found


def train_layout(layout: str) -> dict[str, Trace]:
    """Run on each rank: all models of a layout."""
    return core_cells.train_all(cells_of(layout), LAYOUTS[layout])


def train_pipelines(layout: str, names: list[str]) -> dict[str, Any]:
    """Run on each rank: some of the pipelines of a layout."""
    chosen = {name: cell for name, cell in pipelines_of(layout).items() if name in names}
    return pipeline_cells.train_pipelines(chosen, PIPELINES[layout])
