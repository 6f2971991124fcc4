"""The command ``mds-train plan``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from mds_train.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from mds_train.config import TrainConfig
    from mds_train.plan.machines import Fitted, Machine
    from mds_train.plan.memory import MemoryPlan

__all__ = ["EXAMPLES", "add_arguments", "show_plan", "show_published"]

EXAMPLES = """\
examples:
  mds-train plan gpt3-175b --gpu a100-80
  mds-train plan run.toml --gpus 64 --gpu h100 --parallel.tp-size 4
  mds-train plan llama3-70b --gpus 512 --gpu h100 --search
  mds-train plan --published

CONFIG is a file or the name of a recipe. Nothing is allocated and nothing is started.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; settings of the run may follow."""
    parser.add_argument("config", metavar="CONFIG", nargs="?")
    parser.add_argument("--gpus", type=int, metavar="N", help="default: as the recipe says, or 1")
    parser.add_argument("--gpu", default="a100-80", metavar="KIND", help="%(default)s, h100, ...")
    parser.add_argument(
        "--efficiency",
        type=float,
        metavar="X",
        help="share of the peak that matrix products reach (default: fitted on published runs)",
    )
    parser.add_argument(
        "--disk", type=float, default=5.0, metavar="GB/s", help="speed of the storage (%(default)s)"
    )
    parser.add_argument("--search", action="store_true", help="show the five best layouts")
    parser.add_argument(
        "--published",
        action="store_true",
        help="show the time model beside runs of others, and end",
    )


def show_plan(
    config: TrainConfig, options: argparse.Namespace, console: Console, *, gpus: int
) -> int:
    """Print the plan of a configuration on so many accelerators.

    Raises:
        ValueError: If the layout does not go with the number of accelerators.
    """
    from mds_train.plan.machines import machine_named
    from mds_train.plan.memory import memory_by_stage

    machine = machine_named(options.gpu)
    if options.search:
        return _show_layouts(config, options, console, gpus=gpus, machine=machine)
    config.check_world(gpus)
    _show_run(config, options, console, gpus=gpus, machine=machine)
    _show_memory(
        memory_by_stage(config, world_size=gpus),
        console,
        machine=machine,
        chosen=config.parallel.zero_stage,
    )
    _show_traffic(config, console, gpus=gpus, machine=machine)
    return ExitCode.DONE


def _show_run(
    config: TrainConfig,
    options: argparse.Namespace,
    console: Console,
    *,
    gpus: int,
    machine: Machine,
) -> None:
    from mds_train.plan.speed import plan_speed
    from mds_train.watch.throughput import duration, short_number

    fitted = _constants(options, machine)
    speed = plan_speed(config, world_size=gpus, machine=machine, fitted=fitted)
    parameters = config.model.num_params()
    value = 4 if config.train.precision == "fp32" else 2
    checkpoint = parameters * (value + (12 if value == 2 else 8))
    tokens = config.train.global_batch_size * config.data.tokens_of_sample
    rows = [
        ("parameters", f"{parameters:,}"),
        ("layout", f"{gpus:,} x {machine.name}: {_layout(config, gpus)}"),
        ("batch", f"{config.train.global_batch_size:,} sequences, {short_number(tokens)} tokens"),
        ("FLOPs a token", short_number(speed.flops_per_token)),
        ("a step", f"{duration(speed.step_seconds)} ({_basis(options, machine, fitted)})"),
        ("bubble", f"{100 * speed.bubble_share:.1f} %"),
        ("MFU", f"{100 * speed.utilisation:.1f} %"),
        ("tokens a day", short_number(speed.tokens_per_day)),
        (
            "this run",
            f"{speed.days:,.1f} days, {short_number(config.train.train_steps * tokens)} tokens",
        ),
        (
            "a checkpoint",
            f"{checkpoint / 1e9:,.1f} GB, {duration(checkpoint / options.disk / 1e9)}",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"[bold]{name:<{width}}[/]  ", end="")
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _constants(options: argparse.Namespace, machine: Machine) -> Fitted:
    """The machine's constants, with the efficiency that the user knows better."""
    if options.efficiency is None:
        return machine.fitted
    return replace(machine.fitted, efficiency=options.efficiency)


def _basis(options: argparse.Namespace, machine: Machine, fitted: Fitted) -> str:
    """What the time rests on."""
    if options.efficiency is not None:
        return f"products at {fitted.efficiency:g} of the peak, as given"
    where = f"published runs on {machine.fitted_on}"
    note = "" if machine.fitted_on == machine.name else ", the nearest kind"
    return f"products at {fitted.efficiency:g} of the peak, as in {where}{note}"


def show_published(console: Console) -> int:
    """Print the time model beside every published run, with constants fitted on the other half."""
    from rich.table import Table

    from mds_train.plan.calibration import fit, published_runs

    runs = published_runs()
    for kind in dict.fromkeys(run.machine.name for run in runs):
        rows = [run for run in runs if run.machine.name == kind]
        halves = [fit(rows[1::2]), fit(rows[0::2])]
        table = Table(
            box=None, pad_edge=False, header_style="bold", title=kind, title_justify="left"
        )
        for name in ("run", "GPUs", "published", "planned", "off", "source"):
            table.add_column(name, justify="left" if name in ("run", "source") else "right")
        for place, run in enumerate(rows):
            planned = run.planned(halves[place % 2])
            off = f"{100 * (planned.step_seconds / run.step_seconds - 1):+.0f} %"
            times = (f"{run.step_seconds:.2f} s", f"{planned.step_seconds:.2f} s")
            table.add_row(run.name, f"{run.gpus:,}", *times, off, run.source)
        console.print(table)
        console.print()
    return ExitCode.DONE


def _layout(config: TrainConfig, gpus: int) -> str:
    parallel = config.parallel
    words = [f"tp {parallel.tp_size}", f"dp {parallel.dp_size(gpus)}"]
    if parallel.ulysses_size > 1:
        words.append(f"ulysses {parallel.ulysses_size}")
    if parallel.pp_size > 1:
        words.append(f"pp {parallel.pp_size} ({parallel.pipeline_schedule})")
    return ", ".join([*words, f"ZeRO {parallel.zero_stage}"])


def _show_memory(
    plans: Mapping[int, MemoryPlan], console: Console, *, machine: Machine, chosen: int
) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("GB of the fullest rank")
    for stage in plans:
        table.add_column(f"ZeRO {stage}" + " *" * (stage == chosen), justify="right")
    parts = ("weights", "gradients", "optimizer", "activations", "head", "buffers", "summing")
    for part in (*parts, "total"):
        sizes = [getattr(plan, part) / 1e9 for plan in plans.values()]
        name = "or, when summing" if part == "summing" else part
        table.add_row(name, *(f"{size:,.1f}" for size in sizes))
    shares = [plan.total / machine.gigabytes / 1e7 for plan in plans.values()]
    table.add_row(f"of {machine.gigabytes:g} GB", *(f"{share:.0f} %" for share in shares))
    console.print()
    console.print(table)


def _show_traffic(config: TrainConfig, console: Console, *, gpus: int, machine: Machine) -> None:
    from rich.table import Table

    from mds_train.plan.speed import plan_traffic

    traffic = plan_traffic(config, world_size=gpus, machine=machine)
    if not traffic:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("a rank sends in a step", "left"), ("GB", "right"), ("ms", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("over")
    for each in traffic:
        where = "the node" if each.inside_node else "the network"
        table.add_row(each.what, f"{each.bytes / 1e9:,.2f}", f"{1e3 * each.seconds:,.0f}", where)
    console.print()
    console.print(table)


def _show_layouts(
    config: TrainConfig,
    options: argparse.Namespace,
    console: Console,
    *,
    gpus: int,
    machine: Machine,
) -> int:
    from mds_train.plan.search import search_layouts
    from mds_train.watch.throughput import duration

    fitted = _constants(options, machine)
    found = search_layouts(config, world_size=gpus, machine=machine, fitted=fitted)
    if not found:
        console.print(
            f"No layout fits {gpus} x {machine.name}: take more of them, larger ones, or a "
            f"smaller global batch or sequence."
        )
        return ExitCode.DIFFERENCE
    for place, candidate in enumerate(found, start=1):
        console.print(f"[bold]{place}. {candidate.name}[/]", highlight=False)
        text = f"   {duration(candidate.step_seconds)} a step; {candidate.reasons}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    return ExitCode.DONE
