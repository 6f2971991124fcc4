from __future__ import annotations

from pathlib import Path

from shell_cases import finish, start, step, validation

from mds_train.events import EventReport
from mds_train.watch.tensorboard import TensorBoardWatcher


def run(folder: Path, *, first: int, last: int, loss: float) -> None:
    watcher = TensorBoardWatcher(folder, peak_tflops=1e-3)
    watcher.on_start(start(folder, step=first))
    for number in range(first + 1, last + 1):
        watcher.on_step(step(number, loss=loss))
    watcher.on_validation(validation(last))
    watcher.on_event(EventReport(event="save", step=last, message="Saved."))
    watcher.on_finish(finish(last))


def test_scalars_stand_by_steps_and_by_tokens_and_a_resume_supersedes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, first=0, last=5, loss=4.0)
    for file in tmp_path.glob("*/events*"):  # as if it were older, which its name says
        file.rename(file.with_name(file.name.replace(".tfevents.", ".tfevents.0")))
    run(tmp_path, first=3, last=4, loss=2.0)

    expected = [4.0, 4.0, 4.0, 2.0]
    for name, per_step in (("steps", 1), ("tokens", 32)):
        events = EventAccumulator(str(tmp_path / name))
        events.Reload()
        losses = events.Scalars("train/loss")
        assert [event.value for event in losses] == expected
        assert [event.step for event in losses] == [per_step * n for n in (1, 2, 3, 4)]
        assert events.Scalars("speed/MFU")[0].value > 0
        assert events.Scalars("validation/validation loss")[-1].step == 4 * per_step
