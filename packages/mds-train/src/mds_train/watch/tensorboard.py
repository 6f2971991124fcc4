"""RUN_DIR/tensorboard: the scalars of a run for TensorBoard, by steps and by tokens.

Two folders, `steps` and `tokens`, which TensorBoard shows as two runs. They cannot be one: when a
run resumes, TensorBoard forgets everything beyond the resume point, and that is one number for all
the scalars of a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.events import (
    EventReport,
    FinishReport,
    StartReport,
    StepReport,
    ValidationReport,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardWatcher"]


class TensorBoardWatcher:
    """Watcher that writes TensorBoard event files; for rank 0 only.

    Args:
        folder: where the event files go.
        peak_tflops: peak of one device; without it no MFU is written.
    """

    def __init__(self, folder: Path, *, peak_tflops: float | None) -> None:
        self._folder = folder
        self._peak_tflops = peak_tflops
        self._by_steps: SummaryWriter | None = None
        self._by_tokens: SummaryWriter | None = None
        self._start: StartReport | None = None
        self._tokens = 0

    def on_start(self, report: StartReport) -> None:
        """Open new event files that supersede what earlier ones say of later steps."""
        from torch.utils.tensorboard import SummaryWriter

        self._start = report
        self._tokens = report.consumed_tokens
        resumed = report.resumed_from is not None
        self._by_steps = SummaryWriter(
            log_dir=str(self._folder / "steps"), purge_step=report.step + 1 if resumed else None
        )
        self._by_tokens = SummaryWriter(
            log_dir=str(self._folder / "tokens"), purge_step=self._tokens + 1 if resumed else None
        )

    def on_step(self, report: StepReport) -> None:
        """Write the step's scalars."""
        self._tokens = report.consumed_tokens
        scalars = {
            "train/loss": report.loss,
            **{f"train/{name} loss": value for name, value in report.loss_terms.items()},
            "train/learning rate": report.lr,
            "train/weight decay": report.weight_decay,
            "train/gradient norm": report.grad_norm,
            "train/skipped steps": float(report.skipped_steps),
            "speed/tokens per second": report.tokens_per_second,
            "speed/seconds per step": report.seconds,
            "speed/data seconds": report.data_seconds,
            **self._rates(report.tokens_per_second),
        }
        for name, value in scalars.items():
            self._add(name, value, step=report.step)

    def on_validation(self, report: ValidationReport) -> None:
        """Write the validation loss."""
        self._add(f"validation/{report.name} loss", report.loss, step=report.step)
        for term, value in report.loss_terms.items():
            self._add(f"validation/{report.name} {term} loss", value, step=report.step)

    def on_event(self, report: EventReport) -> None:
        """Write the event's sentence as text."""
        if self._by_steps is not None:
            self._by_steps.add_text(f"events/{report.event}", report.message, report.step)

    def on_finish(self, report: FinishReport) -> None:
        """Close the file."""
        del report
        self.close()

    def close(self) -> None:
        """Write out what is buffered."""
        for writer in (self._by_steps, self._by_tokens):
            if writer is not None:
                writer.close()
        self._by_steps = self._by_tokens = None

    def _add(self, name: str, value: float, *, step: int) -> None:
        assert self._by_steps is not None, "on_start comes first"
        assert self._by_tokens is not None, "on_start comes first"
        self._by_steps.add_scalar(name, value, step)
        self._by_tokens.add_scalar(name, value, self._tokens)

    def _rates(self, tokens_per_second: float) -> dict[str, float]:
        assert self._start is not None, "on_start comes first"
        flops = tokens_per_second * self._start.flops_per_token / 1e12
        rates = {"speed/TFLOP per second": flops}
        if self._peak_tflops is not None:
            rates["speed/MFU"] = flops / (self._start.world_size * self._peak_tflops)
        return rates
