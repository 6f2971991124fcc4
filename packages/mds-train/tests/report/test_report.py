"""A report shows what the runs wrote, in a page that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mds_train.cli import main
from mds_train.report.charts import charts_of
from mds_train.report.runs import read_run
from mds_train.report.svg import ticks

MODEL = "num_layers = 2\nhidden_size = 32\nnum_attention_heads = 4\nvocab_size = 100\n"


def write_run(
    folder: Path, *, steps: int = 40, ranks: int = 1, batch: int = 8, rate: float = 1000.0
) -> Path:
    """A run that was taken up again in the middle, where its loss rose by exactly 0.5."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f"[model]\n{MODEL}max_position_embeddings = 16\n[data]\nseq_length = 16\n"
        f"[train]\nglobal_batch_size = {batch}\n"
    )
    start = {"world_size": ranks, "parallel": {"tp": 1, "dp": ranks, "zero_stage": 1}}
    lines: list[dict[str, Any]] = [
        {"kind": "event", "event": "start", "step": 0, "message": "<script>", **start}
    ]
    for step in range(1, steps + 1):
        if step == steps // 2 + 1:
            lines.append({"kind": "event", "event": "resume", "step": step - 1, **start})
        loss = 5.0 - 0.01 * step + (0.51 if step > steps // 2 else 0.0)
        lines.append(
            {
                "kind": "train", "step": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.0,
                "seconds": 2.0, "data_seconds": 0.5, "tokens_per_second": rate,
                "consumed_samples": step * batch, "consumed_tokens": step * batch * 16,
            }
        )  # fmt: skip
    lines.append({"kind": "validation", "step": steps, "loss": 4.75, "name": "held out"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


class Page(HTMLParser):
    """Tags and what they point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_and_runs_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", steps=20_000)

    assert main(["report", str(run)]) == 0

    text = (run / "report.html").read_text("utf-8")
    page = Page(text)
    assert page.links == []
    assert "script" not in page.tags
    assert "url(" not in text
    assert "&lt;script&gt;" in text
    assert len(text) < 1_000_000
    assert page.tags.count("svg") == 6  # loss, rate, norm, throughput, TFLOP/s, stall


def test_states_the_jump_at_a_resume(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "first"))

    (jump,) = run.jumps()

    assert jump.step == 20
    assert jump.change == pytest.approx(0.5)
    assert jump.usual == pytest.approx(0.01)
    (loss, *_) = charts_of([run])
    assert "+0.5000" in loss.note
    assert [mark.x for mark in loss.marks] == [20]


def test_flops_follow_from_model_and_rate(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "first", rate=2e6))
    # Forward and backward: 6 a weight that multiplies, 12 a layer, width and position.
    weights = 2 * (4 * 32 * 32 + 2 * 32 * 128) + 100 * 32
    whole_attention = 12 * 2 * 32 * 16

    flops = run.flops_per_token

    assert flops is not None
    assert 6 * weights < flops <= 6 * weights + whole_attention
    assert run.teraflops == pytest.approx(flops * 2e6 / 1e12)


def test_scaling_is_drawn_against_the_smallest_run(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / f"{ranks}", ranks=ranks, batch=8 * ranks, rate=rate))
        for ranks, rate in ((4, 3000.0), (1, 1000.0), (2, 1900.0))
    ]

    charts = {chart.name: chart for chart in charts_of(runs)}

    (efficiency,) = charts["efficiency"].series
    assert efficiency.label == "weak scaling"
    assert list(efficiency.x) == [1, 2, 4]
    assert list(efficiency.y) == pytest.approx([100, 95, 75])


def test_the_comparison_is_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "before" / "run", steps=4)
    write_run(tmp_path / "after" / "run", steps=6, batch=16)

    code = main(
        ["report", "before/run", "after/run", "--universal", "losses", "--output", "both.html"]
    )

    assert code == 0
    with Path("losses.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "before/run", "after/run"]
    assert [row[0] for row in rows[1:]] == ["1", "2", "3", "4", "5", "6"]
    assert float(rows[1][1]) == pytest.approx(4.99)
    assert rows[6][1] == ""
    assert Path("losses.png").read_bytes().startswith(b"\x89PNG")
    text = Path("both.html").read_text("utf-8")
    assert re.search(r"train\.global_batch_size</td><td>8</td><td>16<", text)


@pytest.mark.parametrize("content", [None, "", '{"kind": "train", "step": 1\nx\n'])
def test_what_is_no_run_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    folder = tmp_path / "no-run"
    folder.mkdir()
    if content is not None:
        (folder / "metrics.jsonl").write_text(content)

    assert main(["report", str(folder)]) == 3

    assert "no-run" in capsys.readouterr().err.replace("\n", "")
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (5.1, 9.2, [6, 7, 8, 9]),
        (0, 1e-3, [0, 2e-4, 4e-4, 6e-4, 8e-4, 1e-3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_the_smoothed_loss_does_not_lie_above_a_falling_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", steps=400)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steady = [line for line in map(json.loads, lines) if line["kind"] == "train"]
    steady = [{**line, "loss": 9.0 - 0.01 * line["step"]} for line in steady]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steady))

    (loss, *_) = charts_of([read_run(run)])

    raw, smoothed = loss.series
    middle = slice(len(raw.y) // 4, 3 * len(raw.y) // 4)
    assert smoothed.y[middle] == pytest.approx(raw.y[middle], abs=1e-3)
    assert (smoothed.x[0], smoothed.x[-1]) == (1, 400)


def test_resume_points_of_several_runs_are_named(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name)) for name in ("first", "second")]

    (loss, *_) = charts_of(runs)

    assert [mark.label for mark in loss.marks] == ["first resumed", "second resumed"]
