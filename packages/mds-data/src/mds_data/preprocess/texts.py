"""The texts of input files as plain strings, for whoever needs text and no tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from mds_data.preprocess.inputs import (
    InputError,
    InputFile,
    InputFormat,
    InputReader,
    Record,
    TextUnit,
    find_inputs,
)
from mds_data.preprocess.records import (
    Problem,
    RecordError,
    json_object,
    member_text,
    plain_text,
)
from mds_data.preprocess.report import ProblemLog

__all__ = ["InputTexts"]


class InputTexts:
    """Iterates over all texts, each time anew from the files.

    Args:
        inputs: Paths and globs.
        keys: JSON members that hold text.
        format: How to read all files; by suffix when left out.
        text_unit: What one document of a text file is.
        on_error: A broken record raises InputError, or is left out and counted.
        on_progress: Called with the bytes read and their total.

    Iterating raises InputError if there is no text in any of the files.
    """

    def __init__(
        self,
        inputs: Sequence[str | Path],
        *,
        keys: Sequence[str] = ("text",),
        format: InputFormat | None = None,
        text_unit: TextUnit = "document",
        on_error: Literal["fail", "skip"] = "fail",
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._files = find_inputs(inputs, format=format)
        self._keys = tuple(keys)
        self._text_unit: TextUnit = text_unit
        self._skip = on_error == "skip"
        self._on_progress = on_progress
        self.problems = ProblemLog()

    def __iter__(self) -> Iterator[str]:
        self.problems = ProblemLog()
        total = sum(file.size for file in self._files)
        before = 0
        blank = True
        for file in self._files:
            reader = InputReader(file, text_unit=self._text_unit)
            for record in reader.records():
                for text in self._texts(record, file=file):
                    blank = blank and not text.strip()
                    yield text
                if self._on_progress is not None:
                    self._on_progress(before + reader.bytes_read, total)
            before += reader.bytes_read
        if blank:
            names = ", ".join(file.path.as_posix() for file in self._files)
            raise InputError(f"{names}: there is no text in it; give files that hold some.")

    def _texts(self, record: Record, *, file: InputFile) -> Iterator[str]:
        if not record.data.strip():
            return
        try:
            if file.format == "text":
                yield plain_text(record.data)
                return
            members = json_object(record.data)
            for key in self._keys:
                yield member_text(members, key=key, escaped=b"\\u" in record.data)
        except RecordError as error:
            problem = Problem(file.path.as_posix(), record.line, error.kind, str(error))
            if not self._skip:
                raise InputError(
                    f"{problem}. Mend the line, or leave such records out by --on-error skip."
                ) from None
            self.problems.add([problem])
