"""Layouts on which a run goes on from a checkpoint that one process wrote."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
from recorded_runs import Recorder, train_each
from tiny_run import tiny_config

from mds_kernels.testing import TOLERANCES, run_ranks
from mds_train.config import TrainConfig

Cell = TypeVar("Cell")


def always(few: Sequence[Cell], rest: Sequence[Cell]) -> list[Cell]:
    """``few``; with the environment variable MDS_PARITY=full, as `nox -s parity` sets it, all."""
    return [*few, *rest] if os.environ.get("MDS_PARITY") == "full" else list(few)


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes and how to compute; the data-parallel size is what the ranks leave over."""

    ranks: int
    tp_size: int
    zero_stage: int
    precision: str = "fp32"
    ulysses_size: int = 1
    sequence_sharing: str = "ulysses"
    sequence_parallel: bool = False
    pp_size: int = 1
    ep_size: int = 1
    expert_tensor_parallel: bool = True
    schedule: str | None = None
    virtual_stages: int | None = None
    partition: str = "layers"
    split_rank: int | None = None
    recompute: str = "none"
    recompute_layers: int = 1
    recompute_modules: tuple[str, ...] = ()
    sequence_chunk: int | None = None
    offload_activations: bool = False
    offload_optimizer: str = "none"
    offload_parameters: str = "none"

    @property
    def name(self) -> str:
        dp_size = self.ranks // (self.tp_size * self.pp_size * self.ulysses_size)
        parts = [
            f"tp{self.tp_size}dp{dp_size}z{self.zero_stage}",
            f"pp{self.pp_size}-{self.schedule or '1f1b'}" * (self.pp_size > 1),
            f"stages{self.virtual_stages}" * (self.virtual_stages is not None),
            self.partition.replace(",", "+") * (self.partition != "layers"),
            f"split{self.split_rank}" * (self.split_rank is not None),
            f"{self.sequence_sharing}{self.ulysses_size}" * (self.ulysses_size > 1),
            f"chunk{self.sequence_chunk}" * (self.sequence_chunk is not None),
            f"ep{self.ep_size}" * (self.ep_size > 1),
            "whole" * (not self.expert_tensor_parallel),
            "sp" * self.sequence_parallel,
            f"{self.recompute}{self.recompute_layers}" * (self.recompute != "none"),
            "+".join(self.recompute_modules),
            "offload" * self.offload_activations,
            "state-on-host" * (self.offload_optimizer != "none"),
            "weights-on-host" * (self.offload_parameters != "none"),
            self.precision,
        ]
        return "-".join(part for part in parts if part)

    @property
    def parallel(self) -> dict[str, object]:
        """Fields of the [parallel] table."""
        keys = (
            "tp_size",
            "pp_size",
            "zero_stage",
            "ulysses_size",
            "sequence_sharing",
            "ep_size",
            "expert_tensor_parallel",
            "sequence_parallel",
            "schedule",
            "virtual_stages",
            "partition",
            "split_rank",
        )
        return {key: getattr(self, key) for key in keys}

    @property
    def memory(self) -> dict[str, object]:
        """Fields of the [memory] table."""
        keys = (
            "recompute",
            "recompute_layers",
            "recompute_modules",
            "sequence_chunk",
            "offload_activations",
            "offload_optimizer",
            "offload_parameters",
        )
        return {key: getattr(self, key) for key in keys}


def straight_runs(folder: Path, *, layers: int, **model: object) -> dict[str, Recorder]:
    """A run of one process in each precision, with checkpoints 3 and 6.

    ``model`` replaces further fields of the [model] table, here and below.
    """
    precisions = ("fp32", "bf16")
    configs = [
        tiny_config(
            folder / "store",
            folder / f"straight-{precision}",
            model={"num_layers": layers, **model},
            train={"precision": precision},
            checkpoint={"save_interval": 3},
        )
        for precision in precisions
    ]
    return dict(zip(precisions, run_ranks(train_each, 1, configs)[0], strict=True))


def config_on(
    layout: Layout,
    folder: Path,
    *,
    run: str,
    load: Path,
    exit_step: int,
    layers: int,
    **model: object,
) -> TrainConfig:
    """Go on from a checkpoint of another run, on this layout."""
    return tiny_config(
        folder / "store",
        folder / f"{run}-{layout.name}",
        model={"num_layers": layers, **model},
        train={"precision": layout.precision, "exit_step": exit_step},
        parallel=layout.parallel,
        memory=layout.memory,
        checkpoint={"load": str(load)},
    )


def step_3(folder: Path, precision: str) -> Path:
    """The straight run's checkpoint half way."""
    return folder / f"straight-{precision}" / "checkpoints" / "step-3"


def step_of(layout: Layout, folder: Path, *, run: str, step: int) -> Path:
    """A checkpoint of a run that went on."""
    return folder / f"{run}-{layout.name}" / "checkpoints" / f"step-{step}"


def continue_on(
    layouts: Sequence[Layout], folder: Path, *, layers: int, **model: object
) -> dict[Layout, Recorder]:
    """On each layout: step 3 loaded and saved again ("load"), and trained up to 6 ("go-on")."""
    found: dict[Layout, Recorder] = {}
    for ranks in sorted({layout.ranks for layout in layouts}):
        own = [layout for layout in layouts if layout.ranks == ranks]
        configs = [
            config_on(
                layout,
                folder,
                run=run,
                load=step_3(folder, layout.precision),
                exit_step=to,
                layers=layers,
                **model,
            )
            for layout in own
            for run, to in (("load", 3), ("go-on", 6))
        ]
        every_rank = run_ranks(train_each, ranks, configs, timeout=400)
        for others in every_rank[1:]:
            assert [each.losses for each in others] == [each.losses for each in every_rank[0]]
        found |= dict(zip(own, every_rank[0][1::2], strict=True))
    return found


def assert_same_course(found: Recorder, straight: Recorder, *, layout: Layout) -> None:
    """Steps 4 to 6 have the losses, norms and rates of the straight run."""
    exact = layout.precision == "fp32"
    tolerance = TOLERANCES["layout_loss_float32" if exact else "layout_loss_bfloat16"]
    steps, expected = found.steps, straight.steps[3:]
    assert [s.loss for s in steps] == pytest.approx([s.loss for s in expected], rel=tolerance)
    norms = [s.grad_norm for s in expected]
    assert [s.grad_norm for s in steps] == pytest.approx(norms, rel=1e-5 if exact else 2e-2)
    assert [s.lr for s in steps] == [s.lr for s in expected]
