from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from shell_cases import finish, start, step, validation

from mds_train.watch.console import ConsoleWatcher


def play(console: Console, *, peak_tflops: float | None = None) -> None:
    watcher = ConsoleWatcher(console, interval=4, peak_tflops=peak_tflops)
    watcher.on_start(start(Path("run")))
    for number in range(1, 11):
        watcher.on_step(step(number, loss=10.0 - number))
        if number == 8:
            watcher.on_validation(validation(8, loss=2.5))
    watcher.on_finish(finish(10))


def lines_of(*, peak_tflops: float | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=40)
    play(console, peak_tflops=peak_tflops)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_lines_come_at_the_first_each_fourth_and_the_last_step() -> None:
    lines = lines_of()

    steps = [line.split(" |")[0] for line in lines if line.startswith("step") and "/" in line]
    assert steps == ["step  1/10", "step  4/10", "step  8/10", "step 10/10"]


def test_a_line_holds_means_since_the_last_line_and_the_rest_of_the_run() -> None:
    (line,) = [line for line in lines_of() if line.startswith("step  4/")]

    assert "loss 7.0000 (ppl 1097)" in line  # mean of steps 2, 3 and 4
    assert "lr 1.00e-03" in line
    assert "grad norm 0.80" in line
    assert "64 tok/s" in line
    assert "6.4e-05 TFLOP/s" in line
    assert "ETA 3s" in line
    assert "MFU" not in line


def test_utilisation_is_shown_where_the_peak_is_known() -> None:
    assert any("MFU 3.2%" in line for line in lines_of(peak_tflops=1e-3))


def test_beginning_validation_and_end_are_told() -> None:
    lines = lines_of()

    assert lines[0] == (
        "Training: 12.3k parameters on 2 processes (tp 2, zero stage 1), fp32, 32 tokens a step, "
        "to step 10."
    )
    assert any("validation loss 2.5000 (ppl 12.18) on 1.00k tokens" in line for line in lines)
    assert lines[-2] == "Done at step 10 after 1m01s, loss 3.0000, validation loss 3.1000."


def test_a_run_that_is_at_its_end_says_how_to_go_on() -> None:
    console = Console(file=io.StringIO(), width=40)
    watcher = ConsoleWatcher(console, interval=4, peak_tflops=None)

    watcher.on_start(replace(start(Path("run")), step=10))
    watcher.on_finish(finish(10))

    assert isinstance(console.file, io.StringIO)
    assert "No step was left to do: raise train.train_steps" in console.file.getvalue()
    assert not any("No step" in line for line in lines_of())


def test_a_terminal_gets_a_progress_bar_besides() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)

    play(console)

    assert isinstance(console.file, io.StringIO)
    assert "━" in console.file.getvalue()


@pytest.mark.parametrize("loss", [float("nan"), 1e9])
def test_a_loss_beyond_all_measure_does_not_stop_the_console(loss: float) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO()), interval=1, peak_tflops=None)
    watcher.on_start(start(Path("run")))

    watcher.on_step(step(1, loss=loss))
