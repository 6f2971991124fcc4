"""Rows of Parquet and Arrow files as lines of JSON, so that whoever reads lines reads them too."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from mds_data.errors import DataError

__all__ = ["TableError", "TableFormat", "dataset_files", "table_rows"]

TableFormat = Literal["parquet", "arrow"]

_STEP_BYTES = 2**22
"""Bytes of rows that are turned into Python values at once."""
_MOST_ROWS = 1024
_ARROW_FILE = b"ARROW1"


class TableError(DataError):
    """A table can't be read."""


def table_rows(
    path: Path, *, format: TableFormat, members: Sequence[str] | None
) -> Iterator[tuple[float, bytes]]:
    """Yield each row as a JSON object, and the share of the file that was read with it.

    Args:
        path: The file.
        format: Parquet, or Arrow's IPC (a stream, as HF datasets keeps it, or a file).
        members: The columns to read; all if None.

    Raises:
        TableError: The file is damaged, or has none of the columns.
        ImportError: pyarrow is not installed.
    """
    try:
        pyarrow = importlib.import_module("pyarrow")
    except ImportError:
        raise ImportError(
            f"{path}: {format} files need pyarrow: pip install 'mds-data[{format}]'"
        ) from None
    rows = _parquet_rows if format == "parquet" else _arrow_rows
    try:
        yield from rows(path, members)
    except TableError:
        raise
    except (
        pyarrow.ArrowException,
        ArithmeticError,
        EOFError,
        LookupError,
        OSError,
        ValueError,
    ) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error).splitlines()[0].rstrip(". ")
        raise TableError(f"{path} is damaged, cut or no {format} file: {reason}.") from error


def _parquet_rows(path: Path, members: Sequence[str] | None) -> Iterator[tuple[float, bytes]]:
    parquet = importlib.import_module("pyarrow.parquet")
    # Buffered and without prefetch: a row group may be as large as the file.
    with parquet.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        metadata = file.metadata
        total = metadata.num_rows
        size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
        step = max(1, min(_MOST_ROWS, _STEP_BYTES * total // max(size, 1)))
        names = _chosen(path, file.schema_arrow.names, members)
        done = 0
        for batch in file.iter_batches(batch_size=step, columns=names, use_threads=False):
            for line in _lines(batch):
                done += 1
                yield done / total, line


def _arrow_rows(path: Path, members: Sequence[str] | None) -> Iterator[tuple[float, bytes]]:
    ipc = importlib.import_module("pyarrow.ipc")
    size = max(path.stat().st_size, 1)
    with importlib.import_module("pyarrow").OSFile(str(path)) as file:
        is_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
        file.seek(0)
        if is_file:
            with ipc.open_file(file) as reader:
                names = _chosen(path, reader.schema.names, members)
                for number in range(reader.num_record_batches):
                    share = (number + 1) / reader.num_record_batches
                    for line in _sliced(reader.get_batch(number).select(names)):
                        yield share, line
            return
        with ipc.open_stream(file) as reader:
            names = _chosen(path, reader.schema.names, members)
            for batch in reader:
                share = file.tell() / size
                for line in _sliced(batch.select(names)):
                    yield share, line


def _chosen(path: Path, names: Sequence[str], members: Sequence[str] | None) -> list[str]:
    """Return which columns to read."""
    if members is None:
        return list(names)
    chosen = [name for name in names if name in members]
    if not chosen:
        has = ", ".join(map(repr, names[:10])) or "none"
        raise TableError(f"{path} has no column {members[0]!r} (it has: {has}); choose its name.")
    return chosen


def _sliced(batch: Any) -> Iterator[bytes]:
    """Yield the rows of a batch as it lies in an Arrow file, a few at once."""
    _check(batch)
    step = max(1, min(_MOST_ROWS, _STEP_BYTES * batch.num_rows // max(batch.nbytes, 1)))
    for start in range(0, batch.num_rows, step):
        yield from _lines(batch.slice(start, step))


def _check(batch: Any) -> None:
    """Raise ArrowInvalid if offsets point anywhere, which would end the process later.

    Texts that are no UTF-8 are let pass: they are single broken rows.
    """
    pyarrow = importlib.import_module("pyarrow")
    batch.validate()
    raw = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    for column in batch.columns:
        column.cast(raw.get(column.type, column.type)).validate(full=True)


def _lines(batch: Any) -> Iterator[bytes]:
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        rows = [_row(batch, number) for number in range(batch.num_rows)]
    for row in rows:
        yield row if isinstance(row, bytes) else _json(row)


def _json(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def _row(batch: Any, number: int) -> dict[str, Any] | bytes:
    """Return one row, or the bytes of its first text that is no UTF-8."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[number].as_py()
        except UnicodeDecodeError as error:
            return bytes(error.object)
    return row


def dataset_files(folder: Path) -> list[Path] | None:
    """Return the Arrow files of a folder that HF datasets saved, or None if it is none.

    Raises:
        TableError: It holds several splits, or its description is broken.
    """
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        names = _described(splits).get("splits")
        listed = " or ".join(f"{folder / str(name)}" for name in names or ["a split"])
        raise TableError(f"{folder} holds several splits; name one of them: {listed}.")
    state = folder / "state.json"
    if not state.is_file():
        return None
    files = _described(state).get("_data_files")
    names = [each.get("filename") if isinstance(each, dict) else each for each in files or ()]
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise TableError(f"{state} names no data files of its own folder; save the data set anew.")
    return [folder / name for name in names]


def _described(path: Path) -> dict[str, Any]:
    if path.stat().st_size > 2**24:
        raise TableError(f"{path} is too long to describe a data set.")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TableError(f"{path} is no JSON: {error}.") from None
    if not isinstance(value, dict):
        raise TableError(f"{path} does not describe a data set.")
    return value
