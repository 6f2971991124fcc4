"""Values that each document carries beside its tokens: where it comes from, its language, ..."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from mds_data.preprocess.records import RecordError
from mds_data.privacy.documents import DocumentRedactor
from mds_data.store.columns import text_code

__all__ = ["ColumnKind", "ColumnSpec", "column_values", "parse_column"]

ColumnKind = Literal["category", "hash", "int", "float"]

_SPELLING = re.compile(r"(?P<name>[^=:@/\\*?\"<>|\s]+)(=(?P<member>@file|[^:]+))?(:(?P<kind>\w+))?")
_DTYPES: Mapping[ColumnKind, str] = {
    "category": "<u8",
    "hash": "<u8",
    "int": "<i8",
    "float": "<f8",
}
_NONE = 0
"""Code of a document without a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSpec:
    """One column: its name in the store, the JSON member it comes from, what is kept of it."""

    name: str
    member: str
    """A member of the record, or ``@file`` for the name of the input file."""
    kind: ColumnKind
    """category: a text, one of few; hash: 64 bits of a text; or a number."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """How the column is stored."""
        return np.dtype(_DTYPES[self.kind])


def parse_column(text: str) -> ColumnSpec:
    """Return the column that ``NAME[=MEMBER][:KIND]`` asks for.

    Raises:
        ValueError: It is spelled another way.
    """
    match = _SPELLING.fullmatch(text)
    kind = (match["kind"] or "category") if match else ""
    if match is None or kind not in _DTYPES:
        raise ValueError(
            f"a column is spelled NAME, NAME=MEMBER or NAME=MEMBER:KIND with KIND one of "
            f"{', '.join(_DTYPES)}, not {text!r}."
        )
    return ColumnSpec(
        name=match["name"],
        member=match["member"] or match["name"],
        kind=cast("ColumnKind", kind),
    )


def column_values(
    specs: Sequence[ColumnSpec],
    members: Mapping[str, object] | None,
    *,
    file: str,
    redactor: DocumentRedactor | None = None,
) -> list[str | int | float | None]:
    """Return what a record has for each column: the text of a category, else the value stored.

    Texts are redacted if there is a redactor, also where only their hash is kept: the hash of a
    telephone number is found by trying all of them.

    Raises:
        RecordError: It has none where there must be one, or one of another type.
    """
    known = members or {}
    if redactor is not None:
        known = {
            each.member: redactor.unseen(value)
            if isinstance(value := known.get(each.member), str)
            else value
            for each in specs
        }
    return [_column_value(each, known, file=file) for each in specs]


def _column_value(
    spec: ColumnSpec, members: Mapping[str, object], *, file: str
) -> str | int | float | None:
    value = file if spec.member == "@file" else members.get(spec.member)
    if spec.kind in {"category", "hash"}:
        return _text(spec, value)
    if spec.kind == "float" and value is None:
        return math.nan
    wanted: Sequence[type] = (int,) if spec.kind == "int" else (int, float)
    if type(value) not in wanted:
        raise _wrong(spec, value, "a whole number" if spec.kind == "int" else "a number")
    number = cast("int | float", value)
    if spec.kind == "int" and not -(2**63) <= number < 2**63:
        raise _wrong(spec, value, "a number of 64 bits")
    return number if spec.kind == "int" else _float(number)


def _text(spec: ColumnSpec, value: object) -> str | int | None:
    if value is None:
        return None if spec.kind == "category" else _NONE
    if isinstance(value, (list, dict)):
        raise _wrong(spec, value, "a text")
    text = value if isinstance(value, str) else str(value)
    return text if spec.kind == "category" else text_code(text)


def _float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _wrong(spec: ColumnSpec, value: object, wanted: str) -> RecordError:
    shown = "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    return RecordError("column", f"{spec.member!r} holds {shown}, not {wanted}")
