"""A simulated step as a picture: one line a rank, time from left to right."""

from __future__ import annotations

from xml.sax.saxutils import escape

from mds_core.pipeline.simulation import Simulation, Span

__all__ = ["to_svg", "to_text"]

_COLORS = {"F": "#7aa6da", "I": "#f0b56a", "W": "#9fca8b", "B": "#e58a8a"}
_MEANINGS = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "both gradients"}
_ROW, _UNIT, _LEFT = 26, 24, 60  # pixels: height of a rank, width of a time unit, labels


def to_text(simulation: Simulation, *, width: int = 100) -> str:
    """Draw with letters: F, I, W, B as in `Pass`, dots where a rank is idle.

    Args:
        simulation: What to draw.
        width: Characters for the whole step.
    """
    ranks = range(len(simulation.peak_activations))
    lines = []
    for rank in ranks:
        cells = ["."] * width
        for span in simulation.spans:
            if span.rank == rank:
                first, stop = _columns(span, makespan=simulation.makespan, width=width)
                cells[first:stop] = span.what.kind * (stop - first)
        lines.append(f"rank {rank:>3} {''.join(cells)} peak {simulation.peak_activations[rank]:g}")
    lines.append(_summary(simulation))
    return "\n".join(lines) + "\n"


def _columns(span: Span, *, makespan: float, width: int) -> tuple[int, int]:
    first = round(span.start / makespan * width)
    return first, max(first + 1, round(span.stop / makespan * width))


def _summary(simulation: Simulation) -> str:
    return (
        f"makespan {simulation.makespan:g}, bubble {simulation.bubble:g} "
        f"({simulation.bubble_share:.1%})"
    )


def to_svg(simulation: Simulation) -> str:
    """Draw as an SVG document; each box shows its micro batch and names its pass."""
    ranks = len(simulation.peak_activations)
    width = _LEFT + round(simulation.makespan * _UNIT) + 10
    height = (ranks + 2) * _ROW
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'font-family="sans-serif" font-size="11">'
        ),
        *(f'<text x="4" y="{rank * _ROW + 17}">rank {rank}</text>' for rank in range(ranks)),
        *(_box(span) for span in simulation.spans),
        *_legend(y=ranks * _ROW + 8),
        f'<text x="4" y="{height - 6}">{escape(_summary(simulation))}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(span: Span) -> str:
    x, y = _LEFT + span.start * _UNIT, span.rank * _ROW + 3
    width = (span.stop - span.start) * _UNIT
    kind, stage, micro_batch = span.what
    return (
        f"<g><title>{_MEANINGS[kind]}, stage {stage}, micro batch {micro_batch}</title>"
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{_ROW - 6}" fill="{_COLORS[kind]}" '
        f'stroke="white"/><text x="{x + width / 2:g}" y="{y + 14}" text-anchor="middle">'
        f"{micro_batch}</text></g>"
    )


def _legend(*, y: int) -> list[str]:
    parts = []
    for place, (kind, meaning) in enumerate(_MEANINGS.items()):
        x = _LEFT + place * 120
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}">{meaning}</text>')
    return parts
