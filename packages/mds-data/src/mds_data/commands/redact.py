"""The command redact: JSON lines or text in, JSON lines without private data out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from mds_data.commands.engines import chosen_engine, chosen_task
from mds_data.commands.progress import ProgressLine, megabytes
from mds_data.commands.provenance_options import chosen_sources, record_origin
from mds_data.commands.redaction_rules import chosen_kinds, read_allowed, read_key
from mds_data.commands.text import new_file
from mds_data.curation.redact import RecordRedactor, Redacted, RedactionSettings
from mds_data.curation.redact_report import RedactionReport, samples_page
from mds_data.curation.run import CurationConfig, curated_source, new_output
from mds_data.preprocess.engine import Engine
from mds_data.preprocess.inputs import InputError
from mds_data.preprocess.task import task_path
from mds_data.store.schema import package_version

__all__ = ["redact"]


def redact(arguments: argparse.Namespace) -> int:
    """Write the redacted records, and the report and samples if asked for."""
    report = RedactionReport(settings=_settings(arguments))
    report.settings.redactor()  # refuses a weak key before anything is read
    config = _config(arguments)
    sources = chosen_sources(arguments)
    progress = ProgressLine(sys.stderr, label="redact")
    with ExitStack() as stack:
        pages = [
            (stack.enter_context(new_file(path, overwrite=arguments.overwrite)), content)
            for path, content in _pages(arguments, config)
        ]
        _redact(config, report, engine=chosen_engine(arguments), progress=progress)
        for file, content in pages:
            file.write(content(report))
    record_origin(
        config.output, sources=sources, inputs=report.inputs, transform=_transform(report)
    )
    for line in report.problems.sentences():
        sys.stderr.write(f"redact: {line}\n")
    progress.finish(_summary(report, config.output))
    return 0


def _config(arguments: argparse.Namespace) -> CurationConfig:
    task = chosen_task(arguments)
    return CurationConfig(
        inputs=tuple(arguments.input),
        output=task_path(arguments.output, task),
        input_format=None if arguments.input_format == "auto" else arguments.input_format,
        text_unit=arguments.text_unit,
        on_error=arguments.on_error,
        task=task,
        overwrite=arguments.overwrite,
    )


def _settings(arguments: argparse.Namespace) -> RedactionSettings:
    return RedactionSettings(
        mode=arguments.mode,
        kinds=chosen_kinds(arguments.kinds, arguments.keep_kinds),
        key=read_key(arguments.key_file),
        allow=read_allowed(arguments.allow),
        names=arguments.names,
        json_keys=tuple(arguments.json_keys),
        all_fields=arguments.all_fields,
        drop_keys=tuple(arguments.drop_keys),
        samples=arguments.samples is not None,
    )


def _pages(
    arguments: argparse.Namespace, config: CurationConfig
) -> Iterator[tuple[Path, Callable[[RedactionReport], bytes]]]:
    """What else to write, and how."""
    if arguments.report is not None:
        yield task_path(arguments.report, config.task), _report_bytes
    if arguments.samples is not None:
        yield task_path(arguments.samples, config.task), _samples_bytes


def _transform(report: RedactionReport) -> dict[str, object]:
    members = report.to_json()
    kept = ("documents", "documents_changed", "replaced")
    return {
        "name": "redact",
        "version": package_version(),
        "arguments": {"rules": members["rules"], "members": members["members"]},
        "report": {key: members[key] for key in kept},
    }


def _report_bytes(report: RedactionReport) -> bytes:
    return json.dumps(report.to_json(), indent=2, ensure_ascii=False).encode() + b"\n"


def _samples_bytes(report: RedactionReport) -> bytes:
    return samples_page(report).encode("utf-8", "backslashreplace")


def _redact(
    config: CurationConfig, report: RedactionReport, *, engine: Engine, progress: ProgressLine
) -> None:
    source = curated_source(config)
    make = partial(RecordRedactor, report.settings)
    with new_output(config.output, overwrite=config.overwrite) as output:
        for mark, redacted in engine.run(source, make=make):
            _check(redacted, config)
            output.writelines(redacted.lines)
            report.add(redacted)
            progress.update(
                source.bytes_at(mark),
                source.bytes_total,
                items=report.documents,
                detail=f"{report.documents:,} records",
            )
    report.inputs = tuple(source.done)


def _check(redacted: Redacted, config: CurationConfig) -> None:
    if redacted.problems and config.on_error == "fail":
        raise InputError(
            f"{redacted.problems[0]}. Mend the line, or leave such records out by --on-error skip."
        )


def _summary(report: RedactionReport, output: Path) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.most_common())
    return (
        f"{report.documents:,} documents, {report.touched:,} changed, "
        f"replaced {kinds or 'nothing'}; {megabytes(output.stat().st_size)} MB in {output}"
    )
