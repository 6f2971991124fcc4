"""The commands clean, dedup and decontaminate: texts in, chosen texts and a report out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mds_data.commands.engines import chosen_engine, chosen_task
from mds_data.commands.errors import UsageError
from mds_data.commands.progress import ProgressLine
from mds_data.commands.provenance_options import chosen_sources, record_origin
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, new_output
from mds_data.preprocess.task import task_path

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

    if arguments.task is not None:
        _refuse_with_task(arguments)
    settings = _checked(
        lambda: DedupSettings(
            mode=arguments.mode,
            threshold=arguments.threshold,
            shingle_words=arguments.shingle_words,
            permutations=arguments.permutations,
        )
    )
    if arguments.task is not None:
        return _sign(arguments, settings)
    return _run(arguments, partial(run, signatures=arguments.signatures), settings)


def _refuse_with_task(arguments: argparse.Namespace) -> None:
    given = {
        "--report": arguments.report,
        "--removed": arguments.removed,
        "--signatures": arguments.signatures,
    }
    odd = [name for name, value in given.items() if value]
    if odd:
        raise UsageError(
            f"a task of dedup only signs its files; give {' and '.join(odd)} to the last step, "
            f"which takes the signatures of all tasks."
        )


def _sign(arguments: argparse.Namespace, settings: Any) -> int:
    from mds_data.curation.signatures import sign_task

    config, engine = _config(arguments), chosen_engine(arguments)
    config = replace(config, output=config.output.with_suffix(".signatures"))
    progress = ProgressLine(sys.stderr, label="dedup")

    def show(done: int, total: int, records: int) -> None:
        progress.update(done, total, items=records, detail=f"{records:,} records")

    report = sign_task(config, settings, engine=engine, on_progress=show)
    for line in report.sentences():
        sys.stderr.write(f"dedup: {line}\n")
    progress.finish(
        f"{report.records:,} records signed in {config.output}; when all tasks are done, give "
        f"their folders to --signatures instead of --task"
    )
    return 0


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
            max_texts=arguments.max_texts,
        )
    )
    if settings.max_texts is not None and arguments.task is not None:
        raise UsageError("--max-texts needs all texts, and a task sees a part of them only.")
    if settings.action == "cut" and len(arguments.json_keys) > 1:
        raise UsageError("--action cut works on one key; give one by --json-keys.")
    return _run(arguments, run, settings)


def _checked(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValueError as error:
        raise UsageError(str(error)) from error


def _run(arguments: argparse.Namespace, work: Callable[..., CurationReport], settings: Any) -> int:
    config, engine = _config(arguments), chosen_engine(arguments)
    sources = chosen_sources(arguments)
    progress = ProgressLine(sys.stderr, label=arguments.command)

    def show(done: int, total: int, records: int) -> None:
        progress.update(done, total, items=records, detail=f"{records:,} records")

    if arguments.report is None:
        report = work(config, settings, engine=engine, on_progress=show)
    else:
        path = task_path(arguments.report, config.task)
        with new_output(path, overwrite=arguments.overwrite) as file:
            report = work(config, settings, engine=engine, on_progress=show)
            file.write(json.dumps(report.as_json(), indent=1, ensure_ascii=False).encode() + b"\n")
    record_origin(
        config.output, sources=sources, inputs=report.inputs, transform=report.as_transform()
    )
    for line in report.sentences():
        sys.stderr.write(f"{arguments.command}: {line}\n")
    share = report.characters_out / max(report.characters_in, 1)
    progress.finish(
        f"{report.kept:,} of {report.records:,} records kept, {share:.1%} of the text, "
        f"in {config.output}"
    )
    return 0


def _config(arguments: argparse.Namespace) -> CurationConfig:
    task = chosen_task(arguments)
    return CurationConfig(
        inputs=tuple(arguments.input),
        output=task_path(arguments.output, task),
        keys=tuple(dict.fromkeys(arguments.json_keys)),
        input_format=None if arguments.input_format == "auto" else arguments.input_format,
        text_unit=arguments.text_unit,
        on_error=arguments.on_error,
        task=task,
        removed=arguments.removed and task_path(arguments.removed, task),
        overwrite=arguments.overwrite,
    )
