"""The commands clean, dedup and decontaminate: texts in, chosen texts and a report out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from mds_data.commands.errors import UsageError
from mds_data.commands.preprocess import chosen_engine
from mds_data.commands.progress import ProgressLine
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, new_output
from mds_data.preprocess.task import Task, parse_task

__all__ = ["clean", "decontaminate", "dedup"]


def clean(arguments: argparse.Namespace) -> int:
    """Mend texts and remove those that break the rules."""
    from mds_data.curation.clean import CleanSettings
    from mds_data.curation.clean import clean as run
    from mds_data.curation.filters import LengthLimits, RepetitionLimits

    length = LengthLimits(
        min_characters=arguments.min_characters,
        max_characters=arguments.max_characters,
        min_words=arguments.min_words,
        max_words=arguments.max_words,
    )
    settings = _checked(
        lambda: CleanSettings(
            fix_text=arguments.fix_text,
            languages=frozenset(arguments.languages),
            min_probability=arguments.min_probability,
            length=length,
            repetition=RepetitionLimits() if arguments.repetition else None,
        )
    )
    return _run(arguments, run, settings)


def dedup(arguments: argparse.Namespace) -> int:
    """Write each text once."""
    from mds_data.curation.dedup import DedupSettings
    from mds_data.curation.dedup import dedup as run

    settings = _checked(
        lambda: DedupSettings(
            mode=arguments.mode,
            threshold=arguments.threshold,
            shingle_words=arguments.shingle_words,
            permutations=arguments.permutations,
        )
    )
    return _run(arguments, run, settings)


def decontaminate(arguments: argparse.Namespace) -> int:
    """Remove texts that hold test questions."""
    from mds_data.curation.decontaminate import DecontaminateSettings
    from mds_data.curation.decontaminate import decontaminate as run

    settings = _checked(
        lambda: DecontaminateSettings(
            references=tuple(arguments.against),
            reference_keys=tuple(arguments.against_keys),
            words=arguments.words,
            min_words=min(arguments.min_words, arguments.words),
            action=arguments.action,
            margin=arguments.margin,
            min_piece=arguments.min_piece,
            max_pieces=arguments.max_pieces,
        )
    )
    if settings.action == "cut" and len(arguments.json_keys) > 1:
        raise UsageError("--action cut works on one key; give one by --json-keys.")
    return _run(arguments, run, settings)


def _task(arguments: argparse.Namespace) -> Task | None:
    text = getattr(arguments, "task", None)
    try:
        return None if text is None else parse_task(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _checked(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _run(arguments: argparse.Namespace, work: Callable[..., CurationReport], settings: Any) -> int:
    config = CurationConfig(
        inputs=tuple(arguments.input),
        output=arguments.output,
        keys=tuple(dict.fromkeys(arguments.json_keys)),
        input_format=None if arguments.input_format == "auto" else arguments.input_format,
        text_unit=arguments.text_unit,
        on_error=arguments.on_error,
        task=_task(arguments),
        removed=arguments.removed,
        overwrite=arguments.overwrite,
    )
    progress = ProgressLine(sys.stderr, label=arguments.command)

    engine = chosen_engine(arguments)

    def show(done: int, total: int, records: int) -> None:
        progress.update(done, total, items=records, detail=f"{records:,} records")

    if arguments.report is None:
        report = work(config, settings, engine=engine, on_progress=show)
    else:
        with new_output(arguments.report, overwrite=arguments.overwrite) as file:
            report = work(config, settings, engine=engine, on_progress=show)
            file.write(json.dumps(report.as_json(), indent=1, ensure_ascii=False).encode() + b"\n")
    for line in report.sentences():
        sys.stderr.write(f"{arguments.command}: {line}\n")
    share = report.characters_out / max(report.characters_in, 1)
    progress.finish(
        f"{report.kept:,} of {report.records:,} records kept, {share:.1%} of the text, "
        f"in {arguments.output}"
    )
    return 0
