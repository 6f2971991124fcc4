"""Run a filter over input files: records in, a file of JSON lines and a report out."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import zstandard

from mds_data.curation.records import CuratedBatch, Removal
from mds_data.curation.report import CurationReport
from mds_data.errors import DataError
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine, LocalEngine
from mds_data.preprocess.inputs import InputError, InputFormat, TextUnit, find_inputs
from mds_data.preprocess.records import ERROR_KINDS
from mds_data.preprocess.source import Source
from mds_data.preprocess.task import Task, task_files

__all__ = [
    "CurationConfig",
    "check_errors",
    "curated_source",
    "new_output",
    "removed_line",
    "run_filter",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CurationConfig:
    """What to read and where to write, whatever the filter is."""

    inputs: tuple[str, ...]
    output: Path
    """JSON lines; compressed if the name ends with .gz, .bz2, .xz or .zst."""
    keys: tuple[str, ...] = ("text",)
    """Members that hold text."""
    input_format: InputFormat | None = None
    text_unit: TextUnit = "document"
    on_error: Literal["fail", "skip"] = "fail"
    workers: int = 1
    task: Task | None = None
    """Work on one part of the files only."""
    removed: Path | None = None
    """Write the records that were left out, and why, to this file."""
    overwrite: bool = False


def curated_source(config: CurationConfig) -> Source:
    """Return the input of a filter.

    Raises:
        DataError: The output is one of the inputs.
    """
    files = task_files(find_inputs(config.inputs, format=config.input_format), config.task)
    for file in files:
        if config.output.exists() and file.path.samefile(config.output):
            raise DataError(f"{config.output} is an input too; name another output.")
    return Source(files, text_unit=config.text_unit)


def run_filter(
    config: CurationConfig,
    *,
    command: str,
    arguments: Mapping[str, Any],
    make: Callable[[], Callable[[Batch], CuratedBatch]],
    engine: Engine | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Give every batch to a filter and write what it keeps, in the order of the input.

    Args:
        config: What to read and where to write.
        command: Name of the filter, for the report.
        arguments: Its settings, for the report.
        make: Builds the filter in each worker.
        engine: Where it works; ``config.workers`` processes of this machine when left out.
        on_progress: Called with bytes done, bytes in all and records.

    Raises:
        InputError: A record is broken and ``on_error`` is ``fail``.
    """
    source = curated_source(config)
    report = CurationReport(command=command, arguments=dict(arguments))
    with ExitStack() as stack:
        output = stack.enter_context(new_output(config.output, overwrite=config.overwrite))
        removed = config.removed and stack.enter_context(
            new_output(config.removed, overwrite=config.overwrite)
        )
        for mark, batch in (engine or LocalEngine(workers=config.workers)).run(source, make=make):
            check_errors(batch.removals, config=config)
            output.writelines(line + b"\n" for line in batch.lines)
            if removed:
                removed.writelines(map(removed_line, batch.removals))
            report.add(batch)
            if on_progress is not None:
                on_progress(source.bytes_at(mark), source.bytes_total, report.records)
    report.inputs = tuple(source.done)
    return report


def check_errors(removals: list[Removal], *, config: CurationConfig) -> None:
    """Raise InputError at the first broken record unless such ones are skipped."""
    first = next((each for each in removals if each.reason in ERROR_KINDS), None)
    if first is not None and config.on_error == "fail":
        raise InputError(
            f"{first.file}, line {first.line}: {first.detail}. Mend the line, or leave such "
            f"records out by --on-error skip."
        )


def removed_line(removal: Removal) -> bytes:
    """Return a record that was left out, and why, as a line of JSON."""
    try:
        record = json.loads(removal.data)
    except (ValueError, RecursionError):
        record = removal.data.decode("utf-8", "replace")
    members = {
        "reason": removal.reason,
        "detail": removal.detail,
        "file": removal.file,
        "line": removal.line,
        "record": record,
    }
    return json.dumps(members, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


@contextmanager
def new_output(path: Path, *, overwrite: bool) -> Iterator[IO[bytes]]:
    """Open a file, compressed by its suffix, that gets its name when it is whole.

    Raises:
        DataError: The name is taken.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file in it.")
    if path.exists() and not overwrite:
        raise DataError(f"{path} exists. Choose another output, or replace it by --overwrite.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            with _compressed(file, path.suffix) as output:
                yield output
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _compressed(file: IO[bytes], suffix: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    if suffix == ".gz":  # no date and no name in it, so the same lines give the same bytes
        packed = gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0)
        return io.BufferedWriter(cast("io.RawIOBase", packed), 2**18)
    if suffix == ".bz2":
        return bz2.BZ2File(file, "wb")
    if suffix == ".xz":
        return lzma.LZMAFile(file, "wb")
    if suffix == ".zst":
        frame = zstandard.ZstdCompressor(level=6).stream_writer(file, closefd=False)
        return io.BufferedWriter(cast("io.RawIOBase", frame), 2**18)
    return contextlib.nullcontext(file)
