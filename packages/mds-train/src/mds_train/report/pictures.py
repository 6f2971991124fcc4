"""Charts as PNG files, for slides and papers."""

from __future__ import annotations

from pathlib import Path

from mds_train.report.charts import Chart

__all__ = ["draw_png"]

_COLOURS = ("#2563a8", "#c8442e", "#2a8a57", "#8a57b5", "#b07a10", "#178f9c", "#b5477f", "#5b6470")


def draw_png(chart: Chart, path: Path) -> None:
    """Draw one chart; the file is replaced as a whole."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.6), dpi=160, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    for series in chart.series:
        axes.plot(
            series.x,
            series.y,
            color=_COLOURS[series.colour % len(_COLOURS)],
            alpha=0.3 if series.faint else 1,
            linestyle="--" if series.dashed else "-",
            linewidth=1 if series.faint else 1.6,
            marker="o" if series.dots else None,
            markersize=3.5,
            label=series.label or None,
        )
    for mark in chart.marks:
        axes.axvline(mark.x, color="#8a8f98", linewidth=1, linestyle=":")
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(chart.x_label, fontsize=9)
    axes.set_ylabel(chart.y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if sum(bool(series.label) for series in chart.series) > 1:
        axes.legend(frameon=False, fontsize=8)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)
