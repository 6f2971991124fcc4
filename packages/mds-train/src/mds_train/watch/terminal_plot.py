"""Line plots made of braille characters, for the terminal: each character holds 2 x 4 dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Line", "plot"]

_DOT_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_LABEL_WIDTH = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = ""
    """Rich style of the curve."""
    dots: bool = False
    """Draw the points only, without lines between them."""


@dataclass(frozen=True, slots=True)
class _Window:
    left: float
    right: float
    bottom: float
    top: float
    columns: int
    rows: int

    def dot(self, x: float, y: float) -> tuple[int, int]:
        """Dot column (2 a character) and dot row (4 a character, 0 is the top) of a point."""
        across = (x - self.left) / (self.right - self.left)
        up = (y - self.bottom) / (self.top - self.bottom)
        column = round(across * (2 * self.columns - 1))
        return column, round((1 - up) * (4 * self.rows - 1))


def plot(lines: Sequence[Line], *, width: int = 72, height: int = 14, x_label: str = "") -> str:
    """Draw curves into text with rich markup.

    Args:
        lines: the curves; points that are not finite are left out.
        width: characters of the whole plot, axis included.
        height: rows of the plotting area.
        x_label: what the x axis counts.

    Returns:
        Lines of text; an empty string where there is nothing to draw.
    """
    curves = [(line, _finite_points(line)) for line in lines]
    curves = [(line, points) for line, points in curves if points]
    if not curves:
        return ""
    window = _window_of([points for _, points in curves], width=width, height=height)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for line, points in curves:
        _draw(cells, points, window=window, style=line.style, dots=line.dots)
    rows = [_row(cells, row=row, window=window) for row in range(height)]
    legend = "   ".join(_styled(f"⠒⠒ {line.label}", line.style) for line, _ in curves)
    return "\n".join([*rows, *_x_axis(window, x_label=x_label), " " * 9 + legend])


def _finite_points(line: Line) -> list[tuple[float, float]]:
    pairs = zip(line.x, line.y, strict=True)
    return [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]


def _window_of(
    curves: Sequence[Sequence[tuple[float, float]]], *, width: int, height: int
) -> _Window:
    xs = [x for points in curves for x, _ in points]
    ys = [y for points in curves for _, y in points]
    left, right, bottom, top = min(xs), max(xs), min(ys), max(ys)
    if right == left:
        left, right = left - 0.5, right + 0.5
    if top == bottom:
        bottom, top = bottom - 0.5, top + 0.5
    return _Window(left, right, bottom, top, max(8, width - 9), height)


def _draw(
    cells: dict[tuple[int, int], tuple[int, str]],
    points: Sequence[tuple[float, float]],
    *,
    window: _Window,
    style: str,
    dots: bool,
) -> None:
    placed = [window.dot(x, y) for x, y in points]
    for column, row in placed if dots else _joined(placed):
        key = (row // 4, column // 2)
        bits, _ = cells.get(key, (0, ""))
        cells[key] = (bits | _DOT_BITS[row % 4][column % 2], style)


def _joined(placed: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Fill in the dots between neighbouring points."""
    dots = list(placed[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(placed):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        shares = [step / steps for step in range(1, steps + 1)]
        dots += [(x0 + round((x1 - x0) * share), y0 + round((y1 - y0) * share)) for share in shares]
    return dots


def _row(cells: dict[tuple[int, int], tuple[int, str]], *, row: int, window: _Window) -> str:
    label = ""
    if row in (0, window.rows // 2, window.rows - 1):
        share = row / (window.rows - 1)
        label = _short(window.top - share * (window.top - window.bottom))
    tick = "┤" if label else "│"
    text = "".join(_cell(cells.get((row, column))) for column in range(window.columns))
    return f"{label:>{_LABEL_WIDTH}} {tick}{text}"


def _short(value: float) -> str:
    """Write a number with as many digits as fit in front of the axis."""
    texts = [f"{value:.{digits}g}" for digits in (4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= _LABEL_WIDTH), texts[-1])


def _cell(cell: tuple[int, str] | None) -> str:
    if cell is None:
        return " "
    bits, style = cell
    return _styled(chr(_BLANK | bits), style)


def _styled(text: str, style: str) -> str:
    return f"[{style}]{text}[/]" if style else text


def _x_axis(window: _Window, *, x_label: str) -> list[str]:
    left, right = f"{window.left:g}", f"{window.right:g}"
    gap = window.columns - len(left) - len(right)
    middle = x_label.center(gap) if gap > len(x_label) else " " * max(1, gap)
    return [" " * 8 + "└" + "─" * window.columns, " " * 9 + left + middle + right]
