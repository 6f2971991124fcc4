"""The command redact: JSON lines or text in, JSON lines without private data out."""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from mds_data.commands.errors import UsageError
from mds_data.commands.progress import ProgressLine, megabytes
from mds_data.commands.text import new_file
from mds_data.errors import DataError
from mds_data.preprocess.inputs import InputError, InputFile, InputReader, find_inputs
from mds_data.preprocess.workers import map_in_order
from mds_data.privacy import KINDS, Kind
from mds_data.privacy.records import Batch, RecordRedactor, RedactionSettings
from mds_data.privacy.report import RedactionReport, samples_page

__all__ = ["redact"]

_BATCH = 2**20


def redact(arguments: argparse.Namespace) -> int:
    """Write the redacted records, and the report and samples if asked for."""
    report = RedactionReport(settings=_settings(arguments))
    report.settings.redactor()
    files = find_inputs(
        arguments.input,
        format=None if arguments.input_format == "auto" else arguments.input_format,
    )
    if any(file.path.resolve() == arguments.output.resolve() for file in files):
        raise UsageError(f"{arguments.output} is an input; name another output.")
    progress = ProgressLine(sys.stderr, label="redact")
    with _output(arguments.output, overwrite=arguments.overwrite) as output:
        for file in files:
            _redact_file(file, output, report=report, arguments=arguments, progress=progress)
    for line in report.problems.sentences():
        sys.stderr.write(f"redact: {line}\n")
    _write_reports(report, arguments)
    progress.finish(_summary(report, arguments.output))
    return 0


def _settings(arguments: argparse.Namespace) -> RedactionSettings:
    return RedactionSettings(
        mode=arguments.mode,
        kinds=_kinds(arguments),
        key=None if arguments.key_file is None else read_key(arguments.key_file),
        allow=() if arguments.allow is None else _lines(arguments.allow),
        json_keys=tuple(arguments.json_keys),
        all_fields=arguments.all_fields,
        drop_keys=tuple(arguments.drop_keys),
        samples=arguments.samples is not None,
    )


def _kinds(arguments: argparse.Namespace) -> tuple[Kind, ...]:
    chosen = arguments.kinds or KINDS
    return tuple(cast("Kind", kind) for kind in chosen if kind not in arguments.keep_kinds)


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())


def read_key(path: Path) -> bytes:
    """The key in a file that only its owner may read.

    Raises:
        DataError: Others may read it.
    """
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DataError(f"{path} can be read by others than its owner; run: chmod 600 {path}")
    return path.read_bytes().strip()


def _redact_file(
    file: InputFile,
    output: IO[bytes],
    *,
    report: RedactionReport,
    arguments: argparse.Namespace,
    progress: ProgressLine,
) -> None:
    settings = report.settings
    if file.format == "text":
        settings = RedactionSettings(**{**vars(settings), "is_text": True})
    reader = InputReader(file, text_unit=arguments.text_unit)
    make = functools.partial(RecordRedactor, settings)
    for redacted in map_in_order(_batches(reader), make=make, workers=arguments.workers):
        if redacted.problems and arguments.on_error == "fail":
            raise InputError(
                f"{redacted.problems[0]}. Mend the line, or leave such records out by "
                f"--on-error skip."
            )
        output.writelines(redacted.lines)
        report.add(redacted)
        progress.update(reader.bytes_read, file.size, detail=file.path.name)
    report.inputs.append({"path": str(file.path), "bytes": file.size, "sha256": reader.sha256})


def _batches(reader: InputReader) -> Iterator[Batch]:
    name = str(reader.file.path)
    waiting: list[tuple[int, bytes]] = []
    size = 0
    for record in reader.records():
        if not record.data.strip():
            continue
        waiting.append((record.line, record.data))
        size += len(record.data)
        if size >= _BATCH:
            yield Batch(name, waiting)
            waiting, size = [], 0
    if waiting:
        yield Batch(name, waiting)


@contextmanager
def _output(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """A new file, compressed if it is named .gz; without a time stamp, so equal runs are equal."""
    with new_file(path, overwrite=overwrite) as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            yield raw


def _write_reports(report: RedactionReport, arguments: argparse.Namespace) -> None:
    if arguments.report is not None:
        with new_file(arguments.report, overwrite=arguments.overwrite) as file:
            file.write(json.dumps(report.to_json(), indent=2, ensure_ascii=False).encode() + b"\n")
    if arguments.samples is not None:
        with new_file(arguments.samples, overwrite=arguments.overwrite) as file:
            file.write(samples_page(report).encode("utf-8", "backslashreplace"))


def _summary(report: RedactionReport, output: Path) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.most_common())
    return (
        f"{report.documents:,} documents, {report.touched:,} changed, "
        f"replaced {kinds or 'nothing'}; {megabytes(output.stat().st_size)} MB in {output}"
    )
