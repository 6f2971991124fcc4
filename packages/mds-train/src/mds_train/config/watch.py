"""The [watch] table: what is shown, measured and written down while the run goes."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_choice, require_not_negative, require_positive

__all__ = ["WatchConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """Progress, validation, metrics and logs."""

    log_interval: int = 10
    """Show a line every so many steps; metrics.jsonl and TensorBoard get every step."""

    eval_interval: int | None = None
    """Measure the validation loss every so many steps and at the end; never when left out."""

    eval_samples: int = 64
    """Validation samples, the same ones each time; fewer when the split has fewer."""

    tensorboard: bool = True
    """Write RUN_DIR/tensorboard."""

    json_logs: bool = False
    """Write the log files as one JSON object a line."""

    curves: bool = True
    """Draw RUN_DIR/curves.png at the end."""

    peak_tflops: float | None = None
    """Peak of one device, for the share of it that the model uses (MFU); known for some devices."""

    measure_peak: bool = False
    """Measure the peak at the start by a large matrix product, where peak_tflops is not given."""

    timers: bool = False
    """Wait for the device between the parts of a step, so that their seconds are exact."""

    straggler_interval: int | None = None
    """Compare the ranks' own work every so many steps, and name the slowest."""

    profile_steps: tuple[int, ...] = ()
    """First and last step that torch's profiler covers, into RUN_DIR/profile."""

    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled."""

    memory_snapshot_step: int | None = None
    """Write CUDA's memory history of this step into RUN_DIR/profile."""

    trackers: tuple[str, ...] = ()
    """Also send the numbers to "wandb", "mlflow" or "trackio" (extras of this package)."""

    project: str = "mds-train"
    """Name of the project or experiment there."""

    run_name: str | None = None
    """Name of the run there; that of its folder when left out."""

    def __post_init__(self) -> None:
        require_positive("watch.log_interval", self.log_interval)
        require_positive("watch.eval_interval", self.eval_interval)
        require_positive("watch.peak_tflops", self.peak_tflops)
        require_not_negative("watch.eval_samples", self.eval_samples)
        require_positive("watch.straggler_interval", self.straggler_interval)
        require_positive("watch.memory_snapshot_step", self.memory_snapshot_step)
        for name in self.trackers:
            require_choice("watch.trackers", name, choices=("wandb", "mlflow", "trackio"))
        steps = self.profile_steps
        if steps and (len(steps) != 2 or not 1 <= steps[0] <= steps[1]):
            raise ValueError(
                f"watch.profile_steps is {list(steps)}, but it must be the first and the last "
                f"step, like [3, 5]."
            )
