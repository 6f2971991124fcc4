"""The [watch] table: what is shown, measured and written down while the run goes."""

from __future__ import annotations

from dataclasses import dataclass

from mds_train.config.checks import require_not_negative, require_positive

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
    """Peak of one device, for the share of it that the model uses (MFU)."""

    def __post_init__(self) -> None:
        require_positive("watch.log_interval", self.log_interval)
        require_positive("watch.eval_interval", self.eval_interval)
        require_positive("watch.peak_tflops", self.peak_tflops)
        require_not_negative("watch.eval_samples", self.eval_samples)
