"""The training loop."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from mds_core.groups import ProcessGroups
from mds_core.pipeline import Pipeline
from mds_train.assembly import Parts, assemble, choose_device
from mds_train.batches import ModelInput
from mds_train.config import TrainConfig
from mds_train.config.batch_growth import BatchSizes
from mds_train.config.length_growth import SequenceLengths
from mds_train.divergence import SkippedStep, TrainingDivergedError
from mds_train.evaluation import evaluate
from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
    Watcher,
)
from mds_train.exchange import attempt_on_all, gather_from_all
from mds_train.frozen import fill_frozen
from mds_train.interruption import Agreement, Interruption, Limits
from mds_train.launch import assume_local_rank, distributed, read_environment
from mds_train.model_building import Model
from mds_train.ranks.whereabouts import Whereabouts
from mds_train.resume import Origin, start_state
from mds_train.saving.saver import Saver
from mds_train.saving.sealing import check_sealing
from mds_train.saving.spikes import SpikeDetector
from mds_train.state import TrainState
from mds_train.step import StepOutcome, train_step
from mds_train.teacher import load_teacher, set_teaching
from mds_train.watch.profiling import Profiling
from mds_train.watch.stragglers import straggler_sentence, straggler_table
from mds_train.watch.timing import PhaseTimer

__all__ = ["TrainResult", "TrainingDivergedError", "train"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a run ended with."""

    run_dir: Path
    reason: str
    """"done", "exit-step", "exit-interval", "time-limit", "kill-switch", "skip-train", or the name
    of a signal."""

    step: int
    loss: float | None
    """Training loss of the last step; None if no step was left to do."""

    validation_loss: float | None
    checkpoint: Path | None
    """The newest checkpoint of this run."""


def train(
    config: TrainConfig, *, resume: bool = False, watchers: Sequence[Watcher] = ()
) -> TrainResult:
    """Train a model as the configuration says. Every rank calls it with the same configuration.

    Args:
        config: The run.
        resume: Go on from the newest whole checkpoint in the run's folder, on any layout.
        watchers: What this rank's progress is told to.

    Raises:
        ValueError: If the configuration does not fit the data, the ranks or the checkpoint.
        FileNotFoundError: If there is no checkpoint to start from.
        TrainingDivergedError: If too many steps in a row had to be skipped.
    """
    _connect(config)
    device = choose_device(config.train.device)
    with contextlib.ExitStack() as stack:
        where = Whereabouts(
            Path(config.train.run_dir), rank=dist.get_rank(), world_size=dist.get_world_size()
        )
        stack.enter_context(where)
        stack.enter_context(where.explaining())
        interruption = stack.enter_context(Interruption(device=device, limits=_limits(config)))
        parts = assemble(config, fill=_give_weights)
        stack.callback(parts.close)
        run = _Run(parts, start_state(parts, resume=resume), watchers=watchers, where=where)
        stack.callback(run.close)
        return run.until_done(interruption)


def _give_weights(model: Model | Pipeline, config: TrainConfig, groups: ProcessGroups) -> None:
    """What is loaded before there is an engine: what is not trained."""
    fill_frozen(model, config, groups)
    attempt_on_all(lambda: load_teacher(model, config, groups))


def _limits(config: TrainConfig) -> Limits:
    """What ends a run or saves it besides the plan.

    Raises:
        ValueError: If the kill switch is on already.
    """
    switch = None if config.train.kill_switch_file is None else Path(config.train.kill_switch_file)
    if switch is not None and switch.exists():
        raise ValueError(
            f"{switch}: the kill switch is there (train.kill_switch_file), so nothing was started; "
            f"remove the file to train."
        )
    return Limits(
        kill_switch=switch,
        exit_minutes=config.train.exit_minutes,
        save_minutes=config.checkpoint.save_minutes,
    )


def _connect(config: TrainConfig) -> None:
    """Start torch.distributed where the caller has not: one process, or what a launcher says."""
    if dist.is_initialized():
        assume_local_rank(dist.get_rank())
        return
    connection = contextlib.ExitStack()
    timeout = config.parallel.timeout_seconds
    connection.enter_context(
        distributed(read_environment(), device=config.train.device, timeout_seconds=timeout)
    )
    # DeepSpeed holds on to the default group, so it stays for later runs of this process.
    atexit.register(_disconnect, connection)


def _disconnect(connection: contextlib.ExitStack) -> None:
    if dist.is_initialized():  # unless the caller has ended it already
        connection.close()


def _settling(device: torch.device, *, exact: bool) -> Callable[[], None]:
    """What waits for an accelerator before the clock is read."""
    if not exact or device.type != "cuda":
        return lambda: None
    return functools.partial(torch.cuda.synchronize, device)


class _Run:
    """The loop and what it carries from step to step."""

    def __init__(
        self,
        parts: Parts,
        origin: Origin,
        *,
        watchers: Sequence[Watcher],
        where: Whereabouts,
    ) -> None:
        self._parts = parts
        self._where = where
        self._config = parts.config
        self._origin = origin
        self._watchers = watchers
        self._state = origin.state
        self._loss: float | None = None
        self._validation_loss: float | None = None
        self._saver = Saver(
            parts, parent=origin.parent, newest=origin.own_checkpoint, notify=self._event
        )
        self._sealing_note = check_sealing(self._config.checkpoint, first=parts.groups.rank == 0)
        self._spikes = SpikeDetector(self._config.checkpoint.save_at_loss_spike)
        self._batch_sizes = BatchSizes.from_config(self._config.train)
        self._lengths = SequenceLengths.from_config(self._config.data)
        watch = self._config.watch
        self._timer = PhaseTimer(settle=_settling(parts.device, exact=watch.timers))
        self._phases: dict[str, float] = {}
        self._phase_steps = 0
        self._profiling = Profiling(
            watch, folder=parts.run_dir / "profile", rank=parts.groups.rank, device=parts.device
        )
        self._began = time.perf_counter()

    def until_done(self, interruption: Interruption) -> TrainResult:
        """Step, and look after each step whether to validate, to save or to end."""
        self._announce()
        if self._config.train.skip_train:
            self._validate()
            return self._finish("skip-train")
        if self._state.iteration == 0 and self._config.checkpoint.save_initial:
            self._saver.save(self._state)
        reason = None
        while reason is None and self._state.iteration < self._config.train.last_step:
            with self._profiling.around(self._state.iteration + 1):
                before, outcome = self._state, self._step()
            self._give_up_if_diverged(outcome, first=before.consumed_samples)
            self._compare_ranks()
            self._mark("agreement")
            agreement = interruption.agreed(working=self._saver.is_working)
            reason = self._reason_to_end(agreement)
            if agreement.work_is_done:
                self._mark("save")
                self._saver.advance()
            if self._due(self._config.watch.eval_interval, at_end=agreement.end is None):
                self._validate()
            why = self._reason_to_save(agreement, loss=outcome.loss)
            if why is not None:
                self._mark("save")
                self._saver.save(self._state, why=why)
                interruption.note_save()
        self._mark("save")
        if reason is not None or self._config.checkpoint.save_final:
            self._saver.save(self._state, why=reason or "")
        self._saver.finish()
        done = self._state.iteration >= self._config.train.train_steps
        return self._finish(reason or ("done" if done else "exit-step"))

    def close(self) -> None:
        """Write what was profiled, let go of the threads that save."""
        self._profiling.close()
        self._saver.close()

    def _mark_in_step(self, doing: str, *, step: int) -> None:
        self._where.at(doing, step=step)
        self._timer.at(doing)

    def _add_phases(self, phases: Mapping[str, float]) -> None:
        for name, seconds in phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds
        self._phase_steps += 1

    def _compare_ranks(self) -> None:
        """Name the slowest rank, from time to time."""
        if not self._due(self._config.watch.straggler_interval, at_end=False):
            return
        steps, own = self._phase_steps, self._phases
        self._phases, self._phase_steps = {}, 0
        if self._parts.groups.layout.world_size == 1 or not steps:
            return
        found = gather_from_all((socket.gethostname(), {k: v / steps for k, v in own.items()}))
        rows = straggler_table([parts for _, parts in found], hosts=[host for host, _ in found])
        table = [dataclasses.asdict(row) for row in rows]
        self._event("stragglers", straggler_sentence(rows, steps=steps), ranks=table)

    def _mark(self, doing: str) -> None:
        self._where.at(doing, step=self._state.iteration)

    def _reason_to_end(self, agreement: Agreement) -> str | None:
        if agreement.end is not None:
            message = f"{agreement.end} received: saving, then ending."
            if not agreement.end.startswith("SIG"):
                message = f"The {agreement.end.replace('-', ' ')} is reached: saving, then ending."
            self._event("signal", message, signal=agreement.end)
            return agreement.end
        if self._due(self._config.train.exit_interval, at_end=False):
            return "exit-interval"
        return None

    def _reason_to_save(self, agreement: Agreement, *, loss: float) -> str | None:
        """Why to save after this step: "" for the plan, None not to."""
        if self._spikes.is_spike(loss):
            self._event("spike", f"The loss jumped to {loss:.4f}: saving.", loss=loss)
            return "loss spike"
        if self._due(self._config.checkpoint.save_interval, at_end=False):
            return ""
        return agreement.save

    def _step(self) -> StepOutcome:
        began, before = time.perf_counter(), self._state
        mark = functools.partial(self._mark_in_step, step=before.iteration + 1)
        mark("reading of data")
        set_teaching(self._parts.engine.module, self._config, step=before.iteration + 1)
        batch = self._read(before)
        data_seconds = time.perf_counter() - began
        lr, weight_decay = self._rates(before)
        outcome = train_step(
            self._parts.engine,
            batch,
            groups=self._parts.groups,
            lr=lr,
            weight_decay=weight_decay,
            mark=mark,
        )
        phases = self._timer.taken()
        self._add_phases(phases)
        self._count(before, outcome)
        seconds = time.perf_counter() - began
        self._report_step(
            before, outcome, seconds=seconds, data_seconds=data_seconds, phases=phases
        )
        return outcome

    def _read(self, before: TrainState) -> list[ModelInput]:
        length = self._lengths.at(before.iteration + 1)
        return [
            micro.cut(length).to(self._parts.device)
            for micro in self._parts.reader.read(before.consumed_samples)
        ]

    def _rates(self, before: TrainState) -> tuple[float, float]:
        """The learning rate and the weight decay of the step."""
        schedule = self._parts.schedule
        place = schedule.place(before)
        return schedule.learning_rate(place), schedule.weight_decay(place)

    def _count(self, before: TrainState, outcome: StepOutcome) -> None:
        samples = self._batch_sizes.at(before.consumed_samples)
        length = self._lengths.at(before.iteration + 1)
        tokens = samples * (length + (self._config.data.decoder_seq_length or 0))
        applied = outcome.update.applied
        self._state = before.after_step(samples=samples, tokens=tokens, applied=applied)
        self._loss = outcome.loss

    def _report_step(
        self,
        before: TrainState,
        outcome: StepOutcome,
        *,
        seconds: float,
        data_seconds: float,
        phases: dict[str, float],
    ) -> None:
        state, (lr, weight_decay) = self._state, self._rates(before)
        report = StepReport(
            step=state.iteration,
            loss=outcome.loss,
            loss_terms=outcome.terms,
            lr=lr,
            weight_decay=weight_decay,
            grad_norm=outcome.update.grad_norm,
            seconds=seconds,
            data_seconds=data_seconds,
            tokens_per_second=(state.consumed_tokens - before.consumed_tokens) / seconds,
            batch_samples=state.consumed_samples - before.consumed_samples,
            seq_length=self._lengths.at(state.iteration),
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            applied_updates=state.applied_updates,
            skipped_steps=state.skipped_steps,
            skipped=not outcome.update.applied,
            loss_scale=outcome.update.loss_scale,
            phases=phases,
        )
        for watcher in self._watchers:
            watcher.on_step(report)

    def _give_up_if_diverged(self, outcome: StepOutcome, *, first: int) -> None:
        if outcome.update.applied:
            return
        skipped = SkippedStep(outcome, self._state, first=first)
        details = {} if outcome.cause is None else outcome.cause.details()
        scale = outcome.update.loss_scale
        self._event("skip", skipped.message, first_sample=first, loss_scale=scale, **details)
        reason = skipped.reason_to_give_up(limit=self._config.train.max_skipped_steps)
        if reason is not None:
            self._saver.finish()
            raise TrainingDivergedError(reason)

    def _due(self, interval: int | None, *, at_end: bool) -> bool:
        if interval is None:
            return False
        step = self._state.iteration
        return step % interval == 0 or (at_end and step >= self._config.train.last_step)

    def _validate(self) -> None:
        if self._parts.validation is None:
            return
        self._mark("validation")
        began = time.perf_counter()
        found = evaluate(
            self._parts.engine,
            self._parts.validation,
            num_samples=self._config.watch.eval_samples,
            micro_batch_size=self._config.train.micro_batch_size,
            groups=self._parts.groups,
            device=self._parts.device,
            collate=self._parts.collate,
        )
        self._validation_loss = found.loss
        report = ValidationReport(
            step=self._state.iteration,
            loss=found.loss,
            tokens=found.tokens,
            loss_terms=found.terms,
            seconds=time.perf_counter() - began,
        )
        for watcher in self._watchers:
            watcher.on_validation(report)

    def _announce(self) -> None:
        report = StartReport(
            config=self._config,
            run_dir=self._parts.run_dir,
            rank=self._parts.groups.rank,
            world_size=self._parts.groups.layout.world_size,
            parallel=self._parts.degrees,
            num_parameters=self._config.model.num_params(),
            flops_per_token=self._config.flops_per_token,
            step=self._state.iteration,
            consumed_samples=self._state.consumed_samples,
            consumed_tokens=self._state.consumed_tokens,
            resumed_from=self._origin.checkpoint,
        )
        for watcher in self._watchers:
            watcher.on_start(report)
        for message in self._origin.messages:
            self._event("resume", message)
        if self._sealing_note is not None:
            self._event("encryption", self._sealing_note)

    def _event(self, event: str, message: str, **details: object) -> None:
        logger.info(message)
        report = EventReport(
            event=event, step=self._state.iteration, message=message, details=details
        )
        for watcher in self._watchers:
            watcher.on_event(report)

    def _finish(self, reason: str) -> TrainResult:
        report = FinishReport(
            step=self._state.iteration,
            reason=reason,
            loss=self._loss,
            validation_loss=self._validation_loss,
            checkpoint=self._saver.newest,
            seconds=time.perf_counter() - self._began,
        )
        for watcher in self._watchers:
            watcher.on_finish(report)
        return TrainResult(
            run_dir=self._parts.run_dir,
            reason=reason,
            step=self._state.iteration,
            loss=self._loss,
            validation_loss=self._validation_loss,
            checkpoint=self._saver.newest,
        )
