"""What a person knows of input files: licence, address, terms; and where filtered files come from.

The commands that filter text write ``OUTPUT.provenance.json`` beside their output. Whatever reads
the output next takes it over, so that a store still knows the first files.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from mds_data.errors import DataError
from mds_data.provenance.licence import check_expression
from mds_data.provenance.small_toml import read_small_toml
from mds_data.store.strict_json import parse_json

__all__ = ["SIDECAR_END", "SourceRule", "SourceRules", "read_rules", "write_sidecar"]

SIDECAR_END = ".provenance.json"
_FORMAT = "mds-provenance"
_LARGEST = 256 * 2**20
_MEMBERS = {"files", "licence", "url", "terms", "retrieved"}
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}.{0,30}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRule:
    """What is known of the files that a pattern names."""

    files: str = "*"
    licence: str | None = None
    """SPDX expression."""
    url: str | None = None
    """Where they were fetched."""
    terms: str | None = None
    """What else was agreed to, in words or as a URL."""
    retrieved: str | None = None
    """Day on which they were fetched."""

    def __post_init__(self) -> None:
        if self.licence is not None:
            object.__setattr__(self, "licence", check_expression(self.licence))
        if self.retrieved is not None and not _DATE.fullmatch(self.retrieved):
            raise ValueError(f"retrieved ({self.retrieved[:40]!r}) must be a day: YYYY-MM-DD")

    def covers(self, path: Path) -> bool:
        """Whether a file is one of them."""
        name = path.as_posix()
        return fnmatch.fnmatchcase(name, self.files) or fnmatch.fnmatchcase(path.name, self.files)

    def facts(self) -> dict[str, str]:
        """Return what is known."""
        known = {key: getattr(self, key) for key in ("licence", "url", "terms", "retrieved")}
        return {key: value for key, value in known.items() if value is not None}


@dataclass(frozen=True, slots=True)
class SourceRules:
    """What is known of all input files; the first rule that covers a file counts."""

    rules: tuple[SourceRule, ...] = ()

    def facts(self, path: Path) -> dict[str, Any]:
        """Return the facts of one file for a manifest, with what its sidecar tells.

        Raises:
            DataError: The sidecar is damaged, or belongs to another file.
        """
        found = next((rule.facts() for rule in self.rules if rule.covers(path)), {})
        origin = _read_sidecar(path)
        return found if origin is None else {**found, "origin": origin}

    def check_used(self, paths: Sequence[Path]) -> None:
        """Raise DataError if a rule covers no file: its pattern is misspelt."""
        for rule in self.rules:
            if not any(rule.covers(path) for path in paths):
                raise DataError(
                    f"sources: the pattern {rule.files!r} covers none of the inputs; mend it, or "
                    f"take the entry out"
                )


def read_rules(path: Path) -> SourceRules:
    """Read a TOML file with a table ``[[source]]`` for each group of files.

    Raises:
        DataError: It holds something else.
    """
    members = read_small_toml(path)
    tables = members.get("source")
    if set(members) != {"source"} or not isinstance(tables, list):
        raise DataError(f'{path}: must hold tables [[source]] with files = "..." and licence = ...')
    return SourceRules(
        tuple(_rule(each, name=f"{path}, source {n}") for n, each in _from_1(tables))
    )


def _from_1(tables: list[Any]) -> list[tuple[int, Any]]:
    return list(enumerate(tables, start=1))


def _rule(table: object, *, name: str) -> SourceRule:
    if not isinstance(table, dict) or not set(table) <= _MEMBERS:
        raise DataError(f"{name}: may have {', '.join(sorted(_MEMBERS))} and nothing else")
    values = {
        key: value.isoformat() if isinstance(value, date | datetime) else value
        for key, value in table.items()
    }
    odd = next((key for key, value in values.items() if not isinstance(value, str)), None)
    if odd is not None:
        raise DataError(f"{name}: {odd} must be text")
    try:
        return SourceRule(**values)
    except ValueError as error:
        raise DataError(f"{name}: {error}") from None


def write_sidecar(
    output: Path, *, inputs: Sequence[Mapping[str, Any]], transform: Mapping[str, Any]
) -> Path:
    """Write beside a finished file where it comes from.

    Args:
        output: The file.
        inputs: Records of what was read, with their facts.
        transform: What was done: name, version, arguments, report.
    """
    with output.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    members = {
        "format": _FORMAT,
        "version": 1,
        "file": {"size": output.stat().st_size, "sha256": digest},
        "inputs": list(inputs),
        "transforms": [dict(transform)],
    }
    path = output.with_name(output.name + SIDECAR_END)
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with partial.open("xb") as file:
            file.write(json.dumps(members, ensure_ascii=False, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _read_sidecar(path: Path) -> dict[str, Any] | None:
    sidecar = path.with_name(path.name + SIDECAR_END)
    if not sidecar.is_file():
        return None
    if sidecar.stat().st_size > _LARGEST:
        raise DataError(f"{sidecar}: has over 256 MiB, which no record of sources needs")
    members = parse_json(sidecar.read_bytes(), name=str(sidecar))
    file, inputs, transforms = (members.get(key) for key in ("file", "inputs", "transforms"))
    if members.get("format") != _FORMAT or not isinstance(file, dict):
        raise DataError(f"{sidecar}: is no record of sources that mds-data wrote; remove it")
    if not isinstance(inputs, list) or not isinstance(transforms, list):
        raise DataError(f"{sidecar}: lacks its inputs or transforms; write {path} anew")
    if file.get("size") != path.stat().st_size:
        raise DataError(
            f"{sidecar}: belongs to another {path.name}, of {file.get('size')} bytes; write "
            f"{path} anew by the command that made it, or remove the record"
        )
    return {"sha256": file.get("sha256"), "inputs": inputs, "transforms": transforms}
