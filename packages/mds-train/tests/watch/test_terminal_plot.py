from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mds_train.watch.terminal_plot import Line, plot


def test_a_falling_line_starts_at_the_top_left_and_ends_at_the_bottom_right() -> None:
    text = plot([Line(label="loss", x=[0, 1], y=[5.0, 1.0])], width=29, height=5, x_label="step")

    rows = text.splitlines()
    assert rows[0].startswith("      5 ┤⠉")
    assert rows[4].startswith("      1 ┤")
    assert rows[4].rstrip()[-1] not in " ┤"
    assert "step" in rows[6]
    assert "loss" in rows[7]


def test_styles_are_markup_around_the_dots() -> None:
    assert "[red]" in plot([Line(label="a", x=[0, 1], y=[0, 1], style="red")])


def test_nothing_to_draw_is_no_text() -> None:
    assert plot([]) == ""
    assert plot([Line(label="a", x=[1.0], y=[math.nan])]) == ""


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf)),
        min_size=1,
        max_size=30,
    ),
    st.integers(20, 120),
    st.integers(2, 20),
)
def test_any_points_fit_into_the_plot(
    points: list[tuple[float, float]], width: int, height: int
) -> None:
    line = Line(label="a", x=[x for x, _ in points], y=[y for _, y in points])

    rows = plot([line], width=width, height=height).splitlines()

    assert all(len(row) <= width for row in rows[:height])
