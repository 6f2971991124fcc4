"""The curves of a run: as a picture (curves.png) and as text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_train.watch.metrics import History
from mds_train.watch.terminal_plot import Line, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["CURVES_FILE", "draw_curves", "smooth", "terminal_curves"]

CURVES_FILE = "curves.png"

_TRAIN = "#4C78A8"
_VALIDATION = "#E45756"
_QUIET = "#8A8F98"
_INK = "#2B2F36"


def smooth(values: Sequence[float], *, weight: float = 0.9) -> list[float]:
    """Return the exponential moving average, corrected at the start where little has been seen."""
    average, seen, smoothed = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        seen = weight * seen + (1 - weight)
        smoothed.append(average / seen)
    return smoothed


def draw_curves(
    history: History, path: Path, *, title: str = "", unigram_entropy: float | None = None
) -> None:
    """Draw loss, learning rate and gradient norm of a run into a PNG.

    Args:
        history: what `read_metrics` gives.
        path: file to write; it is replaced as a whole.
        title: heading, usually the run's name.
        unigram_entropy: loss of the best model that knows token frequencies only; drawn as a line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.6), dpi=144, layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, 2, height_ratios=[2.6, 1])
    loss_axes = figure.add_subplot(grid[0, :])
    _draw_loss(loss_axes, history, unigram_entropy=unigram_entropy)
    _draw_small(figure.add_subplot(grid[1, 0]), history, key="lr", label="learning rate")
    _draw_small(figure.add_subplot(grid[1, 1]), history, key="grad_norm", label="gradient norm")
    if title:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold", color=_INK)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(path)


def terminal_curves(history: History, *, width: int = 80) -> str:
    """Draw training and validation loss as text with rich markup."""
    steps, losses = _series(history.train, "loss")
    lines = [
        Line(label="training loss", x=steps, y=smooth(losses, weight=_weight(losses)), style="blue")
    ]
    validation_steps, validation_losses = _series(history.validation, "loss")
    if validation_steps:
        lines.append(
            Line(label="validation loss", x=validation_steps, y=validation_losses, style="red")
        )
    return plot(lines, width=min(width, 100), x_label="step")


def _weight(values: Sequence[float]) -> float:
    """Smooth over about a fortieth of the run: enough to see the course, too little to lag."""
    return 1 - 1 / max(2, len(values) / 40)


def _series(entries: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Return steps and values, without the steps whose value was not finite."""
    kept = [entry for entry in entries if entry.get(key) is not None]
    return [int(entry["step"]) for entry in kept], [float(entry[key]) for entry in kept]


def _draw_loss(axes: Axes, history: History, *, unigram_entropy: float | None) -> None:
    steps, losses = _series(history.train, "loss")
    axes.plot(steps, losses, color=_TRAIN, alpha=0.25, linewidth=1)
    axes.plot(
        steps,
        smooth(losses, weight=_weight(losses)),
        color=_TRAIN,
        linewidth=1.8,
        label="training (smoothed)",
    )
    _draw_validation(axes, history)
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=_QUIET, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"unigram entropy {unigram_entropy:.2f}",
            xy=(1, unigram_entropy),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color=_QUIET,
        )
    _mark_resumes(axes, history, labelled=True)
    _dress(axes, ylabel="loss (nats a token)")
    axes.set_xlabel("step", fontsize=9, color=_INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="upper right")


def _draw_validation(axes: Axes, history: History) -> None:
    steps, losses = _series(history.validation, "loss")
    if not steps:
        return
    axes.plot(
        steps,
        losses,
        color=_VALIDATION,
        linewidth=1.6,
        marker="o",
        markersize=4,
        label="validation",
    )
    axes.annotate(
        f"{losses[-1]:.3f}",
        xy=(steps[-1], losses[-1]),
        xytext=(0, 7),
        textcoords="offset points",
        ha="right",
        fontsize=9,
        fontweight="bold",
        color=_VALIDATION,
    )


def _draw_small(axes: Axes, history: History, *, key: str, label: str) -> None:
    steps, values = _series(history.train, key)
    axes.plot(steps, values, color=_INK, linewidth=1)
    _mark_resumes(axes, history, labelled=False)
    _dress(axes, ylabel=label)


def _mark_resumes(axes: Axes, history: History, *, labelled: bool) -> None:
    for step in history.resume_steps:
        axes.axvline(step, color=_QUIET, linewidth=1, linestyle=":")
        if labelled:
            axes.annotate(
                "resumed",
                xy=(step, 1),
                xycoords=("data", "axes fraction"),
                xytext=(4, -10),
                textcoords="offset points",
                fontsize=8,
                color=_QUIET,
            )


def _dress(axes: Axes, *, ylabel: str) -> None:
    """Light frame, light grid, readable labels."""
    axes.set_ylabel(ylabel, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8, color=_QUIET, labelcolor=_INK)
    axes.grid(visible=True, color="#E8EAED", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#C4C8CE")
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4))
