"""The steps of runs as CSV: one row a step, one column a run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from mds_train.report.runs import Run

__all__ = ["write_csv"]


def write_csv(runs: Sequence[Run], path: Path, *, key: str = "loss") -> None:
    """Write one number of every step of every run; empty where a run has no such step."""
    columns = [dict(zip(*run.series(key), strict=True)) for run in runs]
    steps = sorted({step for column in columns for step in column})
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["step", *(run.name for run in runs)])
        table.writerows(
            [int(step), *(column.get(step, "") for column in columns)] for step in steps
        )
    partial.replace(path)
