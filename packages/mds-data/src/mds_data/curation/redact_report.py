"""What a redaction replaced: counts as JSON, and a page of samples. Neither shows a value."""

from __future__ import annotations

import html
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mds_data.curation.redact import Redacted, RedactionSettings
from mds_data.preprocess.report import InputRecord, ProblemLog
from mds_data.privacy.findings import ALL_KINDS, Kind

__all__ = ["RedactionReport", "samples_page"]

_SAMPLES_A_KIND = 12
_SEED = 1234


@dataclass(kw_only=True)
class RedactionReport:
    """Counts over all records."""

    settings: RedactionSettings
    inputs: Sequence[InputRecord] = ()
    documents: int = 0
    touched: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    problems: ProblemLog = field(default_factory=ProblemLog)
    samples: dict[Kind, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, redacted: Redacted) -> None:
        """Count one batch, and keep a few samples of each kind, evenly from all batches."""
        self.documents += len(redacted.lines)
        self.touched += redacted.touched
        self.counts += redacted.counts
        self.problems.add(redacted.problems)
        choice = random.Random(f"{_SEED}:{self.documents}")
        for kind, before, after in redacted.samples:
            kept = self.samples.setdefault(kind, [])
            if len(kept) < _SAMPLES_A_KIND:
                kept.append((before, after))
            elif choice.random() < _SAMPLES_A_KIND / (1 + self.counts[kind]):
                kept[choice.randrange(len(kept))] = (before, after)

    def to_json(self) -> dict[str, Any]:
        """The report as plain data: what was replaced and how, never what it was."""
        return {
            "format": "mds-redaction-report",
            "version": 1,
            "rules": dict(self.settings.described()),
            "members": "all" if self.settings.all_fields else list(self.settings.json_keys),
            "inputs": [asdict(each) for each in self.inputs],
            "documents": self.documents,
            "documents_changed": self.touched,
            "replaced": {kind: self.counts[kind] for kind in ALL_KINDS if self.counts[kind]},
            "left_out": self.problems.as_json(),
        }


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What was redacted</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .2rem .8rem .2rem 0; text-align: left; }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums; }}
p.s {{ font: 13px/1.5 ui-monospace, monospace; margin: .2rem 0; white-space: pre-wrap; }}
mark {{ border-radius: .2rem; padding: 0 .3rem; }}
</style></head><body>
<h1>What was redacted</h1>
<p>{documents:,} documents, {touched:,} of them changed, mode <b>{mode}</b>. The samples show what
stands around a replaced value; the values are in no file.</p>
<table><tr><th>kind</th><th>replaced</th></tr>{rows}</table>
{sections}
</body></html>
"""


def samples_page(report: RedactionReport) -> str:
    """One self-contained page for a person to judge whether the right things were replaced."""
    rows = "".join(
        f'<tr><td>{kind}</td><td class="n">{count:,}</td></tr>'
        for kind, count in report.counts.most_common()
    )
    sections = "".join(
        f"<h2>{kind}</h2>" + "".join(map(_sample, [kind] * len(samples), samples))
        for kind, samples in sorted(report.samples.items())
    )
    return _PAGE.format(
        documents=report.documents,
        touched=report.touched,
        mode=html.escape(report.settings.mode),
        rows=rows,
        sections=sections,
    )


def _sample(kind: Kind, around: Sequence[str]) -> str:
    before, after = (html.escape(" ".join(text.split())) for text in around)
    return f'<p class="s">… {before} <mark>{kind}</mark> {after} …</p>'
