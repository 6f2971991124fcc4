"""The time model beside runs that others published: fit its constants, show what it misses."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from mds_train.config import TrainConfig
from mds_train.plan.machines import Fitted, Machine, machine_named
from mds_train.plan.speed import SpeedPlan, plan_speed
from mds_train.recipes.catalogue import find_recipe
from mds_train.recipes.sizes import configuration_of

__all__ = ["PublishedRun", "fit", "published_runs"]


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One row of published.toml."""

    source: str
    name: str
    machine: Machine
    gpus: int
    config: TrainConfig
    fused_attention: bool
    step_seconds: float
    """As published."""

    def planned(self, fitted: Fitted | None = None) -> SpeedPlan:
        """What the time model says of it, with these constants or the machine's."""
        return plan_speed(
            self.config,
            world_size=self.gpus,
            machine=self.machine,
            fitted=fitted,
            fused_attention=self.fused_attention,
        )

    def ratio(self, fitted: Fitted | None = None) -> float:
        """Planned over published seconds of a step."""
        return self.planned(fitted).step_seconds / self.step_seconds


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Every row, in the file's order."""
    text = files(__package__).joinpath("published.toml").read_text("utf-8")
    return tuple(_run(row) for row in tomllib.loads(text)["run"])


def fit(runs: Sequence[PublishedRun]) -> Fitted:
    """The constants with the least squares of the relative errors; neither is negative.

    A step is linear in 1 / efficiency and in the exposed share, so three plans of each run tell its
    coefficients.

    Args:
        runs: Rows of one kind of accelerator.
    """
    still = [run.planned(Fitted(efficiency=np.inf, exposed=0)).step_seconds for run in runs]
    busy = [run.planned(Fitted(efficiency=1, exposed=0)).step_seconds for run in runs]
    sent = [run.planned(Fitted(efficiency=np.inf, exposed=1)).step_seconds for run in runs]
    published = np.array([run.step_seconds for run in runs])
    columns = np.stack([np.subtract(busy, still), np.subtract(sent, still)], axis=1)
    columns /= published[:, None]
    goal = 1 - np.array(still) / published
    slowness, exposed = np.linalg.lstsq(columns, goal, rcond=None)[0]
    if exposed < 0 or len(runs) == 1:
        slowness, exposed = columns[:, 0] @ goal / (columns[:, 0] @ columns[:, 0]), 0.0
    return Fitted(efficiency=float(1 / slowness), exposed=float(exposed))


def _run(row: dict[str, Any]) -> PublishedRun:
    config = _configuration(row)
    return PublishedRun(
        source=row["source"],
        name=row["name"],
        machine=machine_named(row["gpu"]),
        gpus=row["gpus"],
        config=config,
        fused_attention=row.get("fused_attention", True),
        step_seconds=_step_seconds(row, config),
    )


def _configuration(row: dict[str, Any]) -> TrainConfig:
    config = configuration_of(find_recipe(row.get("recipe", "gpt3-175b")))
    interleaved = row["stages"] > 1
    return replace(
        config,
        model=config.model if "recipe" in row else _gpt(row, config),
        data=replace(config.data, seq_length=row["length"]),
        train=replace(
            config.train,
            global_batch_size=row["batch"],
            micro_batch_size=row["micro_batch"],
            rampup_batch_size=(),
        ),
        parallel=replace(
            config.parallel,
            tp_size=row["tp"],
            pp_size=row["pp"],
            schedule="interleaved-1f1b" if interleaved else None,
            virtual_stages=row["stages"] if interleaved else None,
            sequence_parallel=row.get("sequence_parallel", False),
            zero_stage=row["zero_stage"],
        ),
        memory=replace(config.memory, recompute=row["recompute"]),
    )


def _gpt(row: dict[str, Any], config: TrainConfig) -> Any:
    return replace(
        config.model,
        num_layers=row["layers"],
        hidden_size=row["hidden"],
        num_attention_heads=row["heads"],
        vocab_size=row["vocabulary"],
        max_position_embeddings=row["length"],
    )


def _step_seconds(row: dict[str, Any], config: TrainConfig) -> float:
    """Seconds of a step, from the unit in which the row was published."""
    tokens = row["batch"] * row["length"]
    if "tokens_per_second" in row:
        return float(tokens / (row["gpus"] * row["tokens_per_second"]))
    layers, hidden, length = row["layers"], row["hidden"], row["length"]
    again = "hardware_teraflops" in row
    passes = 4 if again else 3
    body = passes * 24 * layers * hidden**2 * (1 + length / (6 * hidden))
    flops = body + 6 * row["vocabulary"] * hidden
    rate = row["hardware_teraflops" if again else "model_teraflops"]
    return float(tokens * flops / (row["gpus"] * rate * 1e12))
