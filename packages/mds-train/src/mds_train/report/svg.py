"""Charts as SVG that follows the page's colours, light or dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from mds_train.report.charts import Chart, Series

__all__ = ["draw_svg", "ticks"]

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 38
_COLOURS = 8


def draw_svg(chart: Chart) -> str:
    """One ``<svg>`` element; colours are the classes ``c0`` to ``c7`` of the page's style."""
    frame, title = _Frame(chart), html.escape(chart.title)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">',
        *frame.grid(),
        *(frame.mark(mark.x, mark.label) for mark in chart.marks),
        *(frame.line(series) for series in chart.series if series.x),
        _text(_WIDTH - _RIGHT, _HEIGHT - 6, html.escape(chart.x_label), anchor="end"),
        "</svg>",
    ]
    return "".join(parts)


class _Frame:
    """Where the values of a chart lie in the picture."""

    def __init__(self, chart: Chart) -> None:
        x = [value for series in chart.series for value in series.x]
        y = [value for series in chart.series for value in series.y]
        self._x = _span(x, from_zero=False)
        self._y = _span(y, from_zero=chart.from_zero)

    def _place(self, x: float, y: float) -> tuple[float, float]:
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        across = (x - self._x[0]) / (self._x[1] - self._x[0])
        up = (y - self._y[0]) / (self._y[1] - self._y[0])
        return round(_LEFT + across * width, 1), round(_TOP + (1 - up) * height, 1)

    def grid(self) -> list[str]:
        """Lines and numbers."""
        lines = []
        for value in ticks(*self._y):
            _, y = self._place(self._x[0], value)
            lines.append(f'<path class="g" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            lines.append(_text(_LEFT - 8, y + 4, _number(value), anchor="end"))
        for value in ticks(*self._x):
            x, _ = self._place(value, self._y[0])
            lines.append(_text(x, _HEIGHT - _BOTTOM + 16, _number(value), anchor="middle"))
        return lines

    def mark(self, x: float, label: str) -> str:
        """A dotted vertical line with its label."""
        at, _ = self._place(x, self._y[0])
        return (
            f'<path class="m" d="M{at} {_TOP}V{_HEIGHT - _BOTTOM}"/>'
            f"{_text(at + 4, _TOP + 10, html.escape(label), anchor='start')}"
        )

    def line(self, series: Series) -> str:
        """A line, and dots where each value counts."""
        places = [self._place(x, y) for x, y in zip(series.x, series.y, strict=True)]
        colour = f"c{series.colour % _COLOURS}"
        style = f"l {colour}" + " faint" * series.faint + " dashed" * series.dashed
        path = " ".join(f"{x},{y}" for x, y in places)
        title = f"<title>{html.escape(series.label)}</title>"
        dots = ""
        if series.dots:
            dots = "".join(
                f'<circle class="d {colour}" cx="{x}" cy="{y}" r="3">'
                f"<title>{html.escape(series.label)} {_number(value)}</title></circle>"
                for (x, y), value in zip(places, series.y, strict=True)
            )
        return f'<polyline class="{style}" points="{path}">{title}</polyline>{dots}'


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text class="a" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _span(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        return 0.0, high * 1.05 or 1.0
    if low == high:
        room = abs(low) * 0.05 or 1.0
        return low - room, high + room
    room = 0.0 if all(value == int(value) for value in (low, high)) else 0.04 * (high - low)
    return low - room, high + room


def ticks(low: float, high: float, *, about: int = 5) -> list[float]:
    """Round numbers between two values, about so many."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= raw)
    first = math.ceil(low / step - 1e-9)
    count = int((high - first * step) / step + 1e-9) + 1
    return [(first + i) * step for i in range(count)]


def _number(value: float) -> str:
    """Short: 12.5k, 3e-05, 0.25."""
    size = abs(value)
    if size >= 1e4 or (value and size < 1e-3):
        for power, unit in ((12, "T"), (9, "B"), (6, "M"), (3, "k")):
            if size >= 10**power:
                return f"{value / 10**power:g}{unit}"
        return f"{value:.2g}"
    return f"{value:.4g}"
