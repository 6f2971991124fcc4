"""The [train] table: how long, how large a batch, in which precision, from which seed."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_not_negative, require_positive

__all__ = ["PRECISIONS", "LoopConfig"]

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    """What one run does, whatever the model and the layout are."""

    run_dir: str
    """Folder of the run: configuration, checkpoints, metrics, logs."""

    train_steps: int
    """Length of the training; the schedule ends here too unless it has decay_steps."""

    global_batch_size: int
    """Samples of one optimizer step, over all ranks."""

    rampup_batch_size: tuple[int, ...] = ()
    """Start, increment, samples: the batch grows from the first by the second over the third."""

    micro_batch_size: int = 1
    """Samples of one forward pass on one rank."""

    exit_step: int | None = None
    """Save and end after this step, to go on later; the schedule still aims at train_steps."""

    exit_interval: int | None = None
    """Save and end at each step that is a multiple of this, to be started again."""

    exit_minutes: float | None = None
    """Save and end when so many minutes have passed since the start, as a time limit draws near."""

    kill_switch_file: str | None = None
    """Save and end as soon as this file exists; do not start while it does."""

    skip_train: bool = False
    """Train nothing: load, measure the validation loss once and end."""

    seed: int = 1234
    """Fixes initial weights, the order of the data and dropout, whatever the layout is."""

    precision: str = "fp32"
    """"fp32", or "bf16" or "fp16" with fp32 master weights and fp32 sums of gradients."""

    gradient_clipping: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    max_skipped_steps: int = 10
    """Give up after this many steps in a row whose gradients were not finite."""

    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where a device is present."""

    def __post_init__(self) -> None:
        if not self.run_dir:
            raise ValueError("train.run_dir is empty; name the folder that the run is to fill.")
        for key in ("train_steps", "global_batch_size", "micro_batch_size", "max_skipped_steps"):
            require_positive(f"train.{key}", getattr(self, key))
        for key in ("exit_step", "exit_interval", "exit_minutes"):
            require_positive(f"train.{key}", getattr(self, key))
        require_not_negative("train.gradient_clipping", self.gradient_clipping)
        if self.rampup_batch_size:
            _check_rampup(self.rampup_batch_size, final=self.global_batch_size)
        require_not_negative("train.seed", self.seed)
        require_choice("train.precision", self.precision, choices=PRECISIONS)
        require_choice("train.device", self.device, choices=("auto", "cpu", "cuda"))

    @property
    def last_step(self) -> int:
        """The step after which this run ends."""
        if self.exit_step is None:
            return self.train_steps
        return min(self.exit_step, self.train_steps)


def _check_rampup(ramp: tuple[int, ...], *, final: int) -> None:
    if len(ramp) != 3 or min(ramp) < 0 or not ramp[0] or not ramp[1]:
        raise ValueError(
            f"train.rampup_batch_size is {list(ramp)}, but it must be three whole numbers: the "
            f"first batch's size, what is added each time, and the samples over which it grows."
        )
    start, increment, _ = ramp
    if start > final:
        raise ValueError(
            f"train.rampup_batch_size starts at {start}, above train.global_batch_size {final}, to "
            f"which it grows; lower the one or raise the other."
        )
    if (final - start) % increment:
        raise ValueError(
            f"train.rampup_batch_size goes from {start} by {increment}, which does not lead to "
            f"train.global_batch_size {final}; choose an increment that divides {final - start}."
        )
