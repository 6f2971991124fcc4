"""The command ``mds-train report``."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.errors import ExitCode, InputError

if TYPE_CHECKING:
    from mds_train.report.charts import Chart
    from mds_train.report.runs import Run

__all__ = ["EXAMPLES", "add_arguments", "make_report"]

EXAMPLES = """\
examples:
  mds-train report runs/first
  mds-train report runs/tp1 runs/tp2 runs/tp4 --output scaling.html --pictures pictures
  mds-train report runs/before runs/after --universal losses

The page needs no network and no scripts. --universal writes what the original's comparison of
universal checkpoints wrote: NAME.csv with the losses of all runs, and NAME.png.
"""
_X = {"steps": "step", "samples": "consumed_samples", "tokens": "consumed_tokens"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="folders of runs")
    parser.add_argument(
        "--output", type=Path, metavar="F.html", help="page to write (RUN_DIR/report.html)"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also write each chart as PNG")
    parser.add_argument(
        "--csv", type=Path, metavar="F", help="also write the losses, a column a run"
    )
    parser.add_argument(
        "--universal",
        metavar="NAME",
        help="write NAME.csv and NAME.png with the losses of all runs",
    )
    parser.add_argument("--x", choices=tuple(_X), default="steps", help="x axis (%(default)s)")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="N", help="peak of one device, to draw the share of it"
    )


def make_report(options: argparse.Namespace) -> int:
    """Write what was asked for, and say where it lies.

    Raises:
        InputError: If a folder is no run.
    """
    from mds_train.report.charts import charts_of
    from mds_train.report.page import report_page
    from mds_train.report.runs import read_run

    runs = _with_distinct_names([read_run(folder) for folder in options.runs])
    charts = charts_of(runs, x=_X[options.x], peak_tflops=options.peak_tflops)
    output = options.output or options.runs[0] / "report.html"
    _write(output, report_page(runs, charts))
    for path in [output, *_extras(options, runs, charts)]:
        sys.stdout.write(f"{path}\n")
    return ExitCode.DONE


def _extras(options: argparse.Namespace, runs: list[Run], charts: list[Chart]) -> list[Path]:
    from mds_train.report.pictures import draw_png
    from mds_train.report.tables import write_csv

    written: list[Path] = []
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            written.append(options.pictures / f"{chart.name}.png")
            draw_png(chart, written[-1])
    if options.csv is not None:
        write_csv(runs, options.csv)
        written.append(options.csv)
    if options.universal is not None:
        table, picture = (Path(f"{options.universal}{suffix}") for suffix in (".csv", ".png"))
        write_csv(runs, table)
        draw_png(charts[0], picture)
        written += [table, picture]
    return written


def _with_distinct_names(runs: list[Run]) -> list[Run]:
    """Runs whose folders are named alike get the folder above in their name."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return runs
    longer = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    if len(set(longer)) < len(longer):
        raise InputError("a run is named twice; name each folder once.")
    return [dataclasses.replace(run, name=name) for name, run in zip(longer, runs, strict=True)]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
