"""What the charts of a report show, as data: no colours, no drawing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mds_train.report.runs import Run
from mds_train.watch.curves import smooth

__all__ = ["Chart", "Mark", "Series", "charts_of"]

_MOST_POINTS, _MOST_MARKS = 400, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    """Number of its colour: one a run."""
    faint: bool = False
    """The raw values behind a smoothed line."""
    dots: bool = False
    """Few values, each of which counts."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One picture."""

    name: str
    """Of its file."""
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = field(default=())
    note: str = ""
    from_zero: bool = False


def charts_of(
    runs: Sequence[Run], *, x: str = "step", peak_tflops: float | None = None
) -> list[Chart]:
    """All charts for which the runs have numbers.

    Args:
        runs: One or more.
        x: ``step``, ``consumed_samples`` or ``consumed_tokens``.
        peak_tflops: Peak of one device; with it the share of the peak (MFU) is drawn.
    """
    charts = [
        _loss(runs, x=x),
        _simple(runs, "lr", name="learning-rate", title="Learning rate", y_label="", x=x),
        _simple(runs, "grad_norm", name="gradient-norm", title="Gradient norm", y_label="", x=x),
        _rate(runs, lambda run: 1.0, "throughput", "Throughput", "tokens/s", x=x),
        _rate(runs, _teraflops, "teraflops", "Computed by all ranks", "TFLOP/s", x=x),
        *([_mfu(runs, peak_tflops, x=x)] if peak_tflops else []),
        _stall(runs, x=x),
        _simple(
            runs, "memory_bytes", name="memory", title="Memory of the fullest rank", y_label="GiB",
            x=x, scale=2.0**-30, from_zero=True,
        ),
        *_scaling(runs),
    ]  # fmt: skip
    return [chart for chart in charts if any(len(series.x) for series in chart.series)]


def _label(run: Run, runs: Sequence[Run], what: str = "") -> str:
    if len(runs) == 1:
        return what or run.name
    return f"{run.name} {what}".strip()


def _loss(runs: Sequence[Run], *, x: str) -> Chart:
    series, marks = [], []
    for number, run in enumerate(runs):
        steps, losses = run.series("loss", x=x)
        thin_x, thin_y = _thinned(steps, losses)
        smoothed = _thinned(steps, _smoothed(losses))
        if len(runs) == 1:
            series.append(Series(label="", x=thin_x, y=thin_y, colour=number, faint=True))
        label = _label(run, runs, "training (smoothed)" if len(runs) == 1 else "")
        series.append(Series(label=label, x=smoothed[0], y=smoothed[1], colour=number))
        series += [
            Series(
                label=_label(run, runs, name),
                x=places,
                y=values,
                colour=number + place if len(runs) == 1 else number,
                dots=True,
                dashed=len(runs) > 1,
            )
            for place, (name, (places, values)) in enumerate(run.validation(x=x).items(), start=1)
        ]
        marks += _resumes(run, x=x, label=_label(run, runs, "resumed"))
    return Chart(
        name="loss", title="Loss", x_label=_x_label(x), y_label="nats a token", series=series,
        marks=marks if len(marks) <= _MOST_MARKS else (), note=_jump_note(runs),
    )  # fmt: skip


def _smoothed(values: Sequence[float]) -> list[float]:
    """Means weighted alike to both sides: of the past alone they would lie above a falling loss."""
    weight = 1 - 1 / max(2.0, len(values) / 80)
    before = smooth(values, weight=weight)
    after = smooth(values[::-1], weight=weight)[::-1]
    return [(a + b) / 2 for a, b in zip(before, after, strict=True)]


def _resumes(run: Run, *, x: str, label: str) -> list[Mark]:
    places = {int(entry["step"]): entry.get(x) for entry in run.history.train}
    found = [(step, step if x == "step" else places.get(step)) for step in run.history.resume_steps]
    return [Mark(x=float(at), label=label) for _, at in found if at is not None]


def _jump_note(runs: Sequence[Run]) -> str:
    jumps = [(abs(jump.change), run, jump) for run in runs for jump in run.jumps()]
    if not jumps:
        return ""
    _, run, jump = max(jumps, key=lambda each: each[0])
    where = f"{run.name}, " if len(runs) > 1 else ""
    return (
        f"Largest change of the training loss where a run was taken up again: {jump.change:+.4f} "
        f"({where}after step {jump.step}); from step to step it changes by {jump.usual:.4f} there."
    )


def _x_label(x: str) -> str:
    return x.removeprefix("consumed_")


def _simple(
    runs: Sequence[Run],
    key: str,
    *,
    name: str,
    title: str,
    y_label: str,
    x: str,
    scale: float = 1,
    from_zero: bool = False,
) -> Chart:
    series = []
    for number, run in enumerate(runs):
        places, values = _thinned(*run.series(key, x=x))
        scaled = [scale * value for value in values]
        series.append(Series(label=_label(run, runs), x=places, y=scaled, colour=number))
    return Chart(
        name=name, title=title, x_label=_x_label(x), y_label=y_label, series=series,
        from_zero=from_zero,
    )  # fmt: skip


def _rate(
    runs: Sequence[Run],
    factor: Callable[[Run], float | None],
    name: str,
    title: str,
    y_label: str,
    *,
    x: str,
) -> Chart:
    series = []
    for number, run in enumerate(runs):
        by = factor(run)
        if by is not None:
            places, values = _thinned(*run.series("tokens_per_second", x=x))
            scaled = [by * value for value in values]
            series.append(Series(label=_label(run, runs), x=places, y=scaled, colour=number))
    return Chart(
        name=name, title=title, x_label=_x_label(x), y_label=y_label, series=series, from_zero=True
    )


def _teraflops(run: Run) -> float | None:
    flops = run.flops_per_token
    return None if flops is None else flops / 1e12


def _mfu(runs: Sequence[Run], peak_tflops: float, *, x: str) -> Chart:
    def share(run: Run) -> float | None:
        flops = run.flops_per_token
        return None if flops is None else 100 * flops / (run.world_size * peak_tflops * 1e12)

    title = f"Model FLOPs utilisation, of {peak_tflops:g} TFLOP/s a device"
    return _rate(runs, share, "mfu", title, "%", x=x)


def _stall(runs: Sequence[Run], *, x: str) -> Chart:
    series = []
    for number, run in enumerate(runs):
        entries = [e for e in run.history.train if e.get("seconds") and e.get("data_seconds")]
        places = [float(e[x]) for e in entries if e.get(x) is not None]
        shares = [100 * e["data_seconds"] / e["seconds"] for e in entries if e.get(x) is not None]
        thin = _thinned(places, shares)
        series.append(Series(label=_label(run, runs), x=thin[0], y=thin[1], colour=number))
    return Chart(
        name="data-stall", title="Share of a step spent waiting for data", x_label=_x_label(x),
        y_label="%", series=series, from_zero=True,
    )  # fmt: skip


def _scaling(runs: Sequence[Run]) -> list[Chart]:
    """Speed and efficiency over the number of ranks, where runs of one model differ in it."""
    speed, efficiency = [], []
    for number, (label, members) in enumerate(_scaling_groups(runs)):
        ranks = [float(run.world_size) for run in members]
        rates = [run.teraflops or 0.0 for run in members]
        ideal = rates[0] / ranks[0]
        shares = [100 * rate / (ideal * count) for rate, count in zip(rates, ranks, strict=True)]
        petaflops = [rate / 1e3 for rate in rates]
        speed.append(Series(label=label, x=ranks, y=petaflops, colour=number, dots=True))
        efficiency.append(Series(label=label, x=ranks, y=shares, colour=number, dots=True))
    return [
        Chart(
            name="scaling", title="Speed over ranks", x_label="ranks", y_label="PFLOP/s",
            series=speed, from_zero=True,
        ),
        Chart(
            name="efficiency", title="Efficiency against the smallest run", x_label="ranks",
            y_label="%", series=efficiency, from_zero=True,
        ),
    ]  # fmt: skip


def _scaling_groups(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Strong scaling keeps the global batch, weak scaling the batch of a rank."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        batch = run.settings.get("train", {}).get("global_batch_size")
        if batch is None or run.teraflops is None:
            continue
        model = str(sorted(run.settings.get("model", {}).items()))
        groups.setdefault(("strong scaling", model, str(batch)), []).append(run)
        groups.setdefault(("weak scaling", model, str(batch / run.world_size)), []).append(run)
    found = []
    for (label, *_), members in groups.items():
        if len({run.world_size for run in members}) > 1:
            found.append((label, sorted(members, key=lambda run: run.world_size)))
    return found


def _thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most some hundred points: of each stretch its lowest and highest, so that peaks stay."""
    if len(x) <= _MOST_POINTS:
        return list(x), list(y)
    size = 2 * len(x) / _MOST_POINTS
    kept = [0]
    for stretch in range(_MOST_POINTS // 2):
        inside = range(int(stretch * size), min(len(x), int((stretch + 1) * size)))
        if inside:
            low, high = min(inside, key=y.__getitem__), max(inside, key=y.__getitem__)
            kept += sorted({low, high} - {0, len(x) - 1})
    kept.append(len(x) - 1)
    return [x[i] for i in kept], [y[i] for i in kept]
