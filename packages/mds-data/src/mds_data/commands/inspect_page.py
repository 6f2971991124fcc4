"""One page for a browser with all that `inspect` finds: no script, nothing loaded from elsewhere.

Whatever comes from a store may be hostile, so everything is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mds_data.commands.progress import megabytes
from mds_data.store.inspection import ColumnSummary, Inspection

__all__ = ["page"]

Decode = Callable[[list[int]], str]

_STYLE = """
:root { color-scheme: light dark; --line: #8885; --bar: #4878a8; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .15rem .8rem .15rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--bar);
  padding-left: .8rem }
.bar { display: inline-block; height: .8em; background: var(--bar); min-width: 1px }
code { background: #8882; padding: 0 .25em; border-radius: 3px }
"""
# Nothing may run or be fetched, even if something slipped through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_LONGEST = 2000


def page(found: Inspection, decode: Decode | None, tokenizer: str) -> str:
    """Return the page.

    Args:
        found: What is in the store.
        decode: Makes text of ids, if the store keeps its tokenizer.
        tokenizer: What is to be said about it.
    """
    body = [
        f"<h1>{_text(found.path)}</h1>",
        *_facts(found, tokenizer),
        *_lengths(found),
        *(line for column in found.columns for line in _column(column, found)),
        *_tokens(found, decode),
        *_samples(found, decode),
        *_provenance(found),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_text(found.path)}</title>\n<style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _text(value: object) -> str:
    """Return anything as text that is only text: escaped, without control characters, not long."""
    text = str(value)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    shown = (
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )
    return html.escape("".join(shown))


def _table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    """A table; cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    lines = ["<tr>" + "".join(row) + "</tr>" for row in rows]
    return "<table>" + (f"<tr>{top}</tr>" if top else "") + "\n".join(lines) + "</table>"


def _cell(value: object) -> str:
    return f"<td>{_text(value)}</td>"


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return '<td class="n">-</td>'
    text = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
    return f'<td class="n">{text}</td>'


def _bar(share: float) -> str:
    width = 0.0 if not math.isfinite(share) else 20 * min(max(share, 0.0), 1.0)
    return f'<td><span class="bar" style="width:{width:.2f}rem"></span></td>'


def _facts(found: Inspection, tokenizer: str) -> Iterator[str]:
    manifest = found.manifest
    facts: dict[str, object] = {
        "documents": f"{found.documents:,} ({found.empty_documents:,} empty or erased)",
        "tokens": f"{found.tokens:,} as {manifest.dtype}, {found.gap_tokens:,} positions in gaps",
        "vocabulary": f"{manifest.vocab_size:,}, {found.distinct_tokens:,} of them seen",
        "size": f"{megabytes(found.size)} MB, {manifest.layout} layout",
        "tokenizer": tokenizer,
        "end token": "none" if manifest.eod_id is None else manifest.eod_id,
        "split": ", ".join(
            f"{name} {100 * (stop - start):g} %"
            for name, (start, stop) in (manifest.split or {}).items()
        )
        or "none",
        "segments": len(manifest.segments) or "none",
        "erasures": len(manifest.erasures) or "none",
        "written": f"{manifest.created or '-'} by {manifest.producer.name} "
        f"{manifest.producer.version}, revision {manifest.revision}",
        "uuid": manifest.uuid,
    }
    yield _table([], [[f"<th>{name}</th>", _cell(value)] for name, value in facts.items()])


def _lengths(found: Inspection) -> Iterator[str]:
    if not found.lengths:
        return
    yield "<h2>Document lengths</h2>"
    yield (
        f"<p>{found.shortest:,} to {found.longest:,} tokens, median {found.median:,.0f}, "
        f"mean {found.mean:,.0f}</p>"
    )
    most = max(each.documents for each in found.lengths)
    yield _table(
        ["tokens", "documents", "", "share of all tokens"],
        [
            [
                _cell(f"{each.low:,} - {each.high:,}"),
                _number(each.documents),
                _bar(each.documents / most),
                _cell(f"{each.tokens / max(found.tokens, 1):.1%}"),
            ]
            for each in found.lengths
        ],
    )


def _column(column: ColumnSummary, found: Inspection) -> Iterator[str]:
    yield f"<h2>Column <code>{_text(column.name)}</code></h2>"
    bounds = "" if column.low is None else f", {column.low:g} to {column.high:g}"
    yield f"<p>{column.distinct:,} different values ({_text(column.dtype)}){bounds}</p>"
    if column.values:
        yield _table(
            ["value", "documents", "", "share of all tokens"],
            [
                [
                    _cell(each.value),
                    _number(each.documents),
                    _bar(each.documents / max(found.documents, 1)),
                    _cell(f"{each.tokens / max(found.tokens, 1):.1%}"),
                ]
                for each in column.values
            ],
        )


def _tokens(found: Inspection, decode: Decode | None) -> Iterator[str]:
    if not found.top_tokens:
        return
    yield "<h2>Most frequent tokens</h2>"
    if found.counted_tokens < found.tokens:
        yield f"<p>of {found.counted_tokens:,} tokens that were counted</p>"
    yield _table(
        ["id", "text", "count", "", "share"],
        [
            [
                _number(each.token),
                _cell(repr(decode([each.token])) if decode else ""),
                _number(each.count),
                _bar(each.share / found.top_tokens[0].share),
                _cell(f"{each.share:.2%}"),
            ]
            for each in found.top_tokens
        ],
    )


def _samples(found: Inspection, decode: Decode | None) -> Iterator[str]:
    if found.samples:
        yield "<h2>Samples</h2>"
    for each in found.samples:
        text = decode(list(each.tokens)) if decode else " ".join(map(str, each.tokens))
        more = " ..." if len(each.tokens) < each.length else ""
        yield f"<p>document {each.number:,}, {each.length:,} tokens</p>"
        yield f"<pre>{_text(text)}{more}</pre>"


def _provenance(found: Inspection) -> Iterator[str]:
    provenance = found.manifest.provenance
    inputs = _listed(provenance.get("inputs"))
    if inputs:
        yield "<h2>Inputs</h2>"
        yield _table(
            ["file", "bytes", "licence", "from", "sha256"],
            [
                [_cell(each.get(key)) for key in ("path", "size", "licence", "url", "sha256")]
                for each in inputs[:200]
            ],
        )
    for transform in _listed(provenance.get("transforms")):
        yield f"<h2>Made by <code>{_text(transform.get('name'))}</code></h2>"
        rows: dict[str, Any] = {"version": transform.get("version")}
        for part in ("arguments", "report"):
            value = transform.get(part)
            rows |= value if isinstance(value, dict) else {}
        yield _table([], [[f"<th>{_text(key)}</th>", _cell(value)] for key, value in rows.items()])


def _listed(value: object) -> list[dict[str, Any]]:
    """The objects in what should be a list of objects."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
