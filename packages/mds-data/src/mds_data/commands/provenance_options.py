"""The options that say where input files come from, and what they become."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_data.commands.errors import UsageError

if TYPE_CHECKING:
    from mds_data.preprocess.report import InputRecord
    from mds_data.provenance.source_facts import SourceRules

__all__ = ["add_source_options", "chosen_sources", "record_origin"]


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add --licence, --source-url, --terms and --sources."""
    group = parser.add_argument_group(
        "sources", "Recorded with the result; mds-data licences reads them."
    )
    group.add_argument(
        "--licence", metavar="SPDX", help="licence of all inputs, such as CC-BY-4.0 or MIT"
    )
    group.add_argument("--source-url", metavar="URL", help="where all inputs were fetched")
    group.add_argument("--terms", metavar="TEXT", help="what else was agreed to for all inputs")
    group.add_argument(
        "--sources",
        type=Path,
        metavar="F.toml",
        help="instead: tables [[source]] with files (a pattern), licence, url, terms, retrieved",
    )


def chosen_sources(arguments: argparse.Namespace) -> SourceRules:
    """Return what the arguments tell of the inputs.

    Raises:
        UsageError: They don't go together.
        DataError: The file of --sources is not what it should be.
    """
    from mds_data.provenance.source_facts import SourceRule, SourceRules, read_rules

    facts = {
        "licence": arguments.licence,
        "url": arguments.source_url,
        "terms": arguments.terms,
    }
    given = {key: value for key, value in facts.items() if value is not None}
    if arguments.sources is not None and given:
        raise UsageError("--sources names each file's licence, url and terms; drop the others.")
    if arguments.sources is not None:
        return read_rules(arguments.sources)
    try:
        return SourceRules((SourceRule(**given),) if given else ())
    except ValueError as error:
        raise UsageError(f"--licence: {error}") from error


def record_origin(
    output: Path,
    *,
    sources: SourceRules,
    inputs: Sequence[InputRecord],
    transform: Mapping[str, Any],
) -> None:
    """Write beside a finished output where it comes from."""
    from mds_data.provenance.source_facts import write_sidecar

    write_sidecar(output, inputs=list(_records(sources, inputs)), transform=transform)


def _records(sources: SourceRules, inputs: Sequence[InputRecord]) -> Iterator[dict[str, Any]]:
    for each in inputs:
        yield asdict(each) | sources.facts(Path(each.path))
