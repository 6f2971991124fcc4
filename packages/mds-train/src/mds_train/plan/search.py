"""Layouts that fit a number of machines and their memory, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mds_train.config import TrainConfig
from mds_train.plan.activations import LayerCounter
from mds_train.plan.machines import Fitted, Machine
from mds_train.plan.memory import plan_memory
from mds_train.plan.speed import plan_speed, plan_traffic

__all__ = ["Candidate", "search_layouts"]

ROOM = 0.9
"""Share of the memory that a plan may fill; the rest is the allocator's and the libraries'."""
_STAGES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout, and what speaks for or against it."""

    config: TrainConfig
    memory: int
    step_seconds: float
    reasons: str

    @property
    def name(self) -> str:
        """The layout in short."""
        parallel, train = self.config.parallel, self.config.train
        words = [f"tp {parallel.tp_size}", f"pp {parallel.pp_size}"]
        if parallel.pp_size > 1:
            words.append(parallel.pipeline_schedule)
        words += [f"ZeRO {parallel.zero_stage}", f"micro batch {train.micro_batch_size}"]
        return ", ".join([*words, f"recompute {self.config.memory.recompute}"])


def search_layouts(
    config: TrainConfig,
    *,
    world_size: int,
    machine: Machine,
    fitted: Fitted | None = None,
    most: int = 5,
) -> list[Candidate]:
    """The best layouts of the same model and global batch.

    Args:
        config: The run; its own layout is not looked at.
        world_size: Number of accelerators.
        machine: Their kind.
        fitted: The constants of the time model; None takes the machine's.
        most: How many to return.

    Returns:
        Those that fit into the memory, quickest step first; empty if none does.
    """
    count_layer = LayerCounter()
    found: dict[tuple[int, int, int], Candidate] = {}
    for layout in _layouts(config, world_size=world_size, machine=machine):
        memory = plan_memory(layout, world_size=world_size, count_layer=count_layer).total
        if memory > ROOM * machine.gigabytes * 1e9:
            continue
        candidate = _judged(layout, memory, world_size=world_size, machine=machine, fitted=fitted)
        parallel = layout.parallel
        key = (parallel.tp_size, parallel.pp_size, parallel.zero_stage)
        if key not in found or candidate.step_seconds < found[key].step_seconds:
            found[key] = candidate
    return sorted(found.values(), key=lambda each: each.step_seconds)[:most]


def _layouts(config: TrainConfig, *, world_size: int, machine: Machine) -> Iterator[TrainConfig]:
    """Every layout that the settings' own checks let through."""
    for tp in (size for size in (1, 2, 4, 8) if size <= machine.per_node):
        for pp in _STAGES:
            for stage in (1,) if pp > 1 else (1, 2, 3):
                for micro in (1, 2, 4, 8):
                    for recompute in ("none", "selective", "full"):
                        layout = _with(config, tp, pp, stage, micro, recompute)
                        if layout is not None and _fits_world(layout, world_size):
                            yield layout


def _with(
    config: TrainConfig, tp: int, pp: int, stage: int, micro: int, recompute: str
) -> TrainConfig | None:
    schedule = "1f1b" if pp > 1 else None
    try:
        return replace(
            config,
            parallel=replace(
                config.parallel,
                tp_size=tp,
                pp_size=pp,
                schedule=schedule,
                virtual_stages=None,
                partition="layers",
                zero_stage=stage,
                sequence_parallel=tp > 1,
            ),
            train=replace(config.train, micro_batch_size=micro, rampup_batch_size=()),
            memory=replace(config.memory, recompute=recompute, recompute_layers=1),
        )
    except ValueError:
        return None


def _fits_world(config: TrainConfig, world_size: int) -> bool:
    try:
        config.check_world(world_size)
    except ValueError:
        return False
    return True


def _judged(
    config: TrainConfig, memory: int, *, world_size: int, machine: Machine, fitted: Fitted | None
) -> Candidate:
    speed = plan_speed(config, world_size=world_size, machine=machine, fitted=fitted)
    traffic = plan_traffic(config, world_size=world_size, machine=machine)
    heaviest = max(traffic, key=lambda each: each.seconds, default=None)
    reasons = [f"{100 * memory / (machine.gigabytes * 1e9):.0f} % of the memory"]
    if speed.bubble_share:
        reasons.append(f"bubble {100 * speed.bubble_share:.0f} %")
    if config.memory.recompute == "full":
        reasons.append("a third more computation")
    if heaviest is not None and heaviest.seconds > 0.05 * speed.step_seconds:
        share = 100 * heaviest.seconds / speed.step_seconds
        reasons.append(f"{heaviest.what} {share:.0f} % of the step if nothing hid them")
    return Candidate(
        config=config,
        memory=memory,
        step_seconds=speed.step_seconds,
        reasons=", ".join(reasons),
    )
