"""The report as one HTML page that needs nothing else: no network, no scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence

from mds_train.report.charts import Chart
from mds_train.report.differences import differences
from mds_train.report.runs import Run
from mds_train.report.svg import draw_svg
from mds_train.watch.throughput import duration, short_number

__all__ = ["report_page"]

_SHOWN_EVENTS = 200
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #667080; --rule: #e3e6ea; --paper: #fff;
  --c0: #2563a8; --c1: #c8442e; --c2: #2a8a57; --c3: #8a57b5; --c4: #b07a10; --c5: #178f9c;
  --c6: #b5477f; --c7: #5b6470; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #98a2b0; --rule: #2c323a;
  --paper: #14171b; --c0: #6ea8e6; --c1: #ef8370; --c2: #66c493; --c3: #bd95e2; --c4: #dcae55;
  --c5: #5fc6d2; --c6: #e58cb8; --c7: #a4adb9; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 980px; margin: 2.5rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .4rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
.sum td:not(:first-child), .sum th { white-space: nowrap; overflow-wrap: normal; }
.sum td:first-child { min-width: 7rem; } .sum { display: block; overflow-x: auto; }
svg { width: 100%; height: auto; display: block; }
.g { stroke: var(--rule); } .m { stroke: var(--soft); stroke-dasharray: 2 4; }
.a { font-size: 11px; fill: var(--soft); }
.l { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.faint { opacity: .3; stroke-width: 1; } .dashed { stroke-dasharray: 5 4; }
.key { display: inline-block; margin-right: 1.2rem; } .key i { display: inline-block; width: 1.1rem;
  margin-right: .4rem; vertical-align: middle; border-top: .2rem solid; }
.key .broken { border-top-style: dashed; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); } .c5 { stroke: var(--c5); }
.c6 { stroke: var(--c6); } .c7 { stroke: var(--c7); } .d { fill: var(--paper); stroke-width: 1.8; }
"""


def report_page(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """The page.

    Args:
        runs: One or more.
        charts: What `charts_of` gives for them.
    """
    title = " · ".join(run.name for run in runs[:4]) + (" …" if len(runs) > 4 else "")
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="soft">{_heading(runs)}</p>',
        _summary(runs),
        *map(_chart, charts),
        _differences(runs) if len(runs) > 1 else "",
        *(_events(run, named=len(runs) > 1) for run in runs),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"{''.join(body)}</body></html>\n"
    )


def _heading(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    (run,) = runs
    count = run.num_parameters
    size = "" if count is None else f"{short_number(count)} parameters, "
    return html.escape(f"{size}{run.layout}, {run.folder}")


def _summary(runs: Sequence[Run]) -> str:
    names = ["run", "steps", "tokens", "time", "loss", "validation", "best", "tokens/s", "TFLOP/s"]
    names += ["layout"]
    rows = "".join(_row(_summary_cells(run)) for run in runs)
    return f'<table class="sum">{_row(names, tag="th")}{rows}</table>'


def _summary_cells(run: Run) -> list[str]:
    last = run.history.train[-1]
    validation = [e["loss"] for e in run.history.validation if e["loss"] is not None]
    tokens, rate = last.get("consumed_tokens"), run.tokens_per_second
    return [
        run.name,
        f"{last['step']:,}",
        "" if tokens is None else short_number(tokens),
        duration(sum(run.values("seconds"))),
        "" if last["loss"] is None else f"{last['loss']:.4f}",
        f"{validation[-1]:.4f}" if validation else "",
        f"{min(validation):.4f}" if validation else "",
        "" if rate is None else short_number(rate),
        "" if run.teraflops is None else f"{run.teraflops:.3g}",
        run.layout,
    ]


def _row(cells: Sequence[str], *, tag: str = "td") -> str:
    inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"


def _chart(chart: Chart) -> str:
    unit = f' <span class="soft">{html.escape(chart.y_label)}</span>' if chart.y_label else ""
    named = [series for series in chart.series if series.label and series.x]
    keys = "".join(
        f'<span class="key"><i{" class=broken" * each.dashed} '
        f'style="border-color: var(--c{each.colour % 8})"></i>{html.escape(each.label)}</span>'
        for each in named
    )
    legend = f'<p class="soft">{keys}</p>' if len(named) > 1 else ""
    note = f'<p class="soft">{html.escape(chart.note)}</p>' if chart.note else ""
    return f"<h2>{html.escape(chart.title)}{unit}</h2>{legend}{draw_svg(chart)}{note}"


def _differences(runs: Sequence[Run]) -> str:
    found = differences([run.settings for run in runs])
    if not found:
        return "<h2>Settings</h2><p>All runs have the same settings.</p>"
    head = _row(["setting", *(run.name for run in runs)], tag="th")
    rows = "".join(_row([name, *values]) for name, values in found)
    return f"<h2>Settings that differ</h2><table>{head}{rows}</table>"


def _events(run: Run, *, named: bool) -> str:
    events = run.history.events
    rows = "".join(
        _row([f"{event['step']:,}", str(event["event"]), str(event.get("message", ""))])
        for event in events[-_SHOWN_EVENTS:]
    )
    left = len(events) - _SHOWN_EVENTS
    note = f'<p class="soft">{left} earlier events are in metrics.jsonl.</p>' if left > 0 else ""
    title = f"Events of {run.name}" if named else "Events"
    head = _row(["step", "event", ""], tag="th")
    return f"<h2>{html.escape(title)}</h2>{note}<table>{head}{rows}</table>"
