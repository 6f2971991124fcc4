from __future__ import annotations

from pathlib import Path

import pytest
from shell_cases import start, step, validation

from mds_train.watch.curves import draw_curves, smooth, terminal_curves
from mds_train.watch.metrics import History, MetricsFile, read_metrics


@pytest.fixture
def history(tmp_path: Path) -> History:
    path = tmp_path / "metrics.jsonl"
    for first, last in ((0, 6), (4, 10)):
        with MetricsFile(path) as metrics:
            metrics.on_start(start(tmp_path, step=first))
            for number in range(first + 1, last + 1):
                metrics.on_step(step(number, loss=8 / number))
            metrics.on_validation(validation(last))
    return read_metrics(path)


def test_the_average_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([4.0, 0.0], weight=0.5) == pytest.approx([4.0, 4.0 / 3])
    assert smooth([]) == []


def test_a_picture_is_written_as_a_whole(tmp_path: Path, history: History) -> None:
    picture = tmp_path / "curves.png"

    draw_curves(history, picture, title="run", unigram_entropy=6.5)

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.partial"))


def test_both_curves_are_drawn_into_the_terminal(history: History) -> None:
    text = terminal_curves(history)

    assert "training loss" in text
    assert "validation loss" in text
