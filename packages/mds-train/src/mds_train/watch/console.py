"""What a person sees while a run goes: a line every so many steps, on a terminal a bar too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)
from mds_train.watch.throughput import (
    StepTimes,
    duration,
    model_flops_utilisation,
    short_number,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ConsoleWatcher"]


class ConsoleWatcher:
    """Watcher that prints to the console; for rank 0 only.

    Args:
        console: where to print. On a terminal a progress bar stays below the lines.
        interval: print a line every so many steps.
        peak_tflops: peak of one device; without it no MFU is shown.
    """

    def __init__(self, console: Console, *, interval: int, peak_tflops: float | None) -> None:
        self._console = console
        self._interval = interval
        self._peak_tflops = peak_tflops
        self._times = StepTimes()
        self._pending: list[StepReport] = []
        self._start: StartReport | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def on_start(self, report: StartReport) -> None:
        """Say what is about to run."""
        self._start = report
        self._say(describe_start(report))
        if self._console.is_terminal:
            self._progress = _make_progress(self._console)
            self._task = self._progress.add_task(
                "training", total=report.config.train.last_step, completed=report.step, numbers=""
            )
            self._progress.start()

    def on_step(self, report: StepReport) -> None:
        """Move the bar; print a line at the first, every n-th and the last step."""
        start = self._started()
        if self._pending or report.step > start.step + 1:
            self._times.add(report.seconds)  # the first step warms up and would mislead
        self._pending.append(report)
        last = report.step == start.config.train.last_step
        first = report.step == start.step + 1
        if self._progress is not None and self._task is not None:
            numbers = f"loss {report.loss:.4f}  {short_number(report.tokens_per_second)} tok/s"
            self._progress.update(self._task, completed=report.step, numbers=numbers)
        if first or last or report.step % self._interval == 0:
            self._say(self._step_line())
            self._pending.clear()

    def on_validation(self, report: ValidationReport) -> None:
        """Print the validation loss."""
        width = len(str(self._started().config.train.train_steps))
        beside = _beside_loss(report.loss, report.loss_terms)
        self._say(
            f"step {report.step:>{width}} | {report.name} loss {report.loss:.4f} ({beside}) "
            f"on {short_number(report.tokens)} tokens in {duration(report.seconds)}",
            style="bold cyan",
        )

    def on_event(self, report: EventReport) -> None:
        """Nothing: the loop logs the event's sentence, and the log's handler prints it."""

    def on_finish(self, report: FinishReport) -> None:
        """Say how the run ended and where the result lies."""
        self.close()
        reason = "Done" if report.reason == "done" else f"Ended ({report.reason})"
        parts = [f"{reason} at step {report.step} after {duration(report.seconds)}"]
        if report.loss is not None:
            parts.append(f"loss {report.loss:.4f}")
        if report.validation_loss is not None:
            parts.append(f"validation loss {report.validation_loss:.4f}")
        self._say(", ".join(parts) + ".")
        if report.reason == "done" and report.step == self._started().step:
            self._say(
                "No step was left to do: raise train.train_steps to go on, with schedule.override "
                "to stretch the schedule to it."
            )
        if report.checkpoint is not None:
            self._say(f"Checkpoint: {report.checkpoint}")

    def close(self) -> None:
        """Take the progress bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _started(self) -> StartReport:
        assert self._start is not None, "on_start comes first"
        return self._start

    def _say(self, text: str, *, style: str | None = None) -> None:
        from rich.text import Text

        # A style given to print() itself would colour the progress bar too.
        self._console.print(Text(text, style=style or ""), soft_wrap=True)

    def _step_line(self) -> str:
        """Write one line for the steps since the last one: mean loss, last rates, mean speed."""
        start, steps = self._started(), self._pending
        last = steps[-1]
        total = start.config.train.train_steps
        loss = sum(step.loss for step in steps) / len(steps)
        speed = _mean_speed(steps)
        parts = [
            f"step {last.step:>{len(str(total))}}/{total}",
            f"loss {loss:.4f} ({_beside_loss(loss, _mean_terms(steps))})",
            f"lr {last.lr:.2e}",
            f"grad norm {last.grad_norm:.2f}",
            f"{short_number(speed)} tok/s",
            f"{speed * start.flops_per_token / 1e12:.3g} TFLOP/s",
        ]
        if self._peak_tflops is not None:
            share = model_flops_utilisation(
                speed,
                flops_per_token=start.flops_per_token,
                world_size=start.world_size,
                peak_tflops=self._peak_tflops,
            )
            parts.append(f"MFU {share:.1%}")
        if last.data_seconds > 0.05 * last.seconds:
            parts.append(f"data wait {last.data_seconds / last.seconds:.0%}")
        if last.skipped_steps:
            parts.append(f"skipped {last.skipped_steps}")
        remaining = self._times.remaining(start.config.train.last_step - last.step)
        if remaining:
            parts.append(f"ETA {duration(remaining)}")
        return " | ".join(parts)


def describe_start(report: StartReport) -> str:
    """Say in one line what runs, on what."""
    degrees = ", ".join(
        f"{name} {size}"
        for name, size in report.parallel.items()
        if name == "zero_stage" or size > 1
    )
    ranks = "1 process" if report.world_size == 1 else f"{report.world_size} processes"
    config = report.config
    verb = "Training on loaded weights" if report.resumed_from else "Training"
    if config.lora.rank:
        verb = f"Training adapters of rank {config.lora.rank} beside"
    if report.step:
        verb = f"Resuming at step {report.step}"
    tokens = config.train.global_batch_size * config.data.tokens_of_sample
    return (
        f"{verb}: {short_number(report.num_parameters)} parameters on {ranks} "
        f"({degrees.replace('_', ' ')}), {config.train.precision}, "
        f"{short_number(tokens)} tokens a step, to step {config.train.last_step}."
    )


def _mean_speed(steps: list[StepReport]) -> float:
    seconds = sum(step.seconds for step in steps)
    if seconds <= 0:
        return 0.0
    return sum(step.tokens_per_second * step.seconds for step in steps) / seconds


def _mean_terms(steps: list[StepReport]) -> dict[str, float]:
    names = steps[-1].loss_terms
    return {name: sum(step.loss_terms[name] for step in steps) / len(steps) for name in names}


def _beside_loss(loss: float, terms: Mapping[str, float]) -> str:
    """The perplexity; where the loss is a sum of terms, these."""
    if not terms:
        return f"ppl {_perplexity(loss)}"
    return ", ".join(f"{name} {value:.4f}" for name, value in terms.items())


def _perplexity(loss: float) -> str:
    if not math.isfinite(loss):
        return "-"
    return f"{math.exp(loss):.4g}" if loss < 30 else "> 1e13"


def _make_progress(console: Console) -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        transient=True,
    )
