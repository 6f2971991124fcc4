"""From TOML files, environment and command line to one checked configuration.

It remembers where each value is from.

Later layers win: defaults, the base file, the file itself, MDS_* variables, the command line.
"""

from __future__ import annotations

import json
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_train.config.fields import (
    FieldSpec,
    as_declared,
    field_table,
    from_text,
    nearest,
    type_name,
)
from mds_train.config.schema import TrainConfig
from mds_train.errors import InputError

__all__ = [
    "Setting",
    "Settings",
    "build",
    "document_with_origins",
    "given_settings",
    "read_toml",
    "read_variables",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A value and where it was written."""

    value: Any
    origin: str


Settings = Mapping[str, Setting]
"""Keys like "parallel.tp_size"; `{**earlier, **later}` lets the later layer win."""

_BASE_KEY = "base"
_VARIABLE_PREFIX = "MDS_"


def read_toml(path: Path) -> Settings:
    """Read a configuration file and the files that it is based on (`base = "base.toml"`).

    Raises:
        InputError: If the file is no TOML, or has an unknown key or a value of the wrong type.
    """
    return _read_toml(path, chain=())


def _read_toml(path: Path, *, chain: tuple[str, ...]) -> Settings:
    place = os.path.realpath(path)
    if place in chain:
        raise InputError(
            f'{path}: the file is its own base; remove one of the `base = "..."` lines.'
        )
    document = _parse(path)
    settings: dict[str, Setting] = {}
    base = document.pop(_BASE_KEY, None)
    if base is not None:
        if not isinstance(base, str):
            raise InputError(f"{path}: base is {base!r}, but it must be a file name in quotes.")
        settings |= _read_toml(path.parent / base, chain=(*chain, place))
    return settings | _settings_of(document, path=path)


_LARGEST_FILE = 2**22
_MOST_DOTS = 200


def _parse(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise InputError(
            f"{path}: this is a folder, not a TOML file; "
            "`mds-train resume` takes the folder of a run."
        )
    if not path.is_file():
        raise InputError(f"{path}: there is no such configuration file; check the path.")
    if path.stat().st_size > _LARGEST_FILE:
        raise InputError(f"{path}: it has more than {_LARGEST_FILE} bytes, as no settings have.")
    try:
        text = path.read_text(encoding="utf-8")
        # The parser's time grows with the square of a key's length in parts.
        if any(line.partition("=")[0].count(".") > _MOST_DOTS for line in text.splitlines()):
            raise InputError(f"{path}: a line of it names a table in more than {_MOST_DOTS} parts.")
        return tomllib.loads(text)
    except RecursionError as error:
        raise InputError(f"{path}: its brackets are nested too deeply.") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}.") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8."
        ) from error


def _settings_of(document: Mapping[str, Any], *, path: Path) -> dict[str, Setting]:
    specs = field_table(TrainConfig)
    tables = dict.fromkeys(spec.table for spec in specs.values())
    settings: dict[str, Setting] = {}
    for table, content in document.items():
        if table not in tables:
            raise InputError(f"{path}: {_unknown_table(table, content, tables=list(tables))}")
        if not isinstance(content, dict):
            raise InputError(f"{path}: {table} is a table; write its keys under [{table}].")
        for name, value in content.items():
            spec = specs.get(f"{table}.{name}")
            if spec is None:
                raise InputError(f"{path}, table [{table}]: {_unknown_key(table, name)}")
            settings[spec.key] = Setting(value=_declared(spec, value, path=path), origin=str(path))
    return settings


def _declared(spec: FieldSpec, value: object, *, path: Path) -> Any:
    try:
        return as_declared(spec.annotation, value)
    except TypeError as error:
        raise InputError(
            f"{path}, table [{spec.table}]: {spec.name} is {value!r}, but it must be "
            f"{type_name(spec.annotation)}."
        ) from error


def _unknown_table(table: str, content: object, *, tables: list[str]) -> str:
    if not isinstance(content, dict):
        owners = [key for key in field_table(TrainConfig) if key.partition(".")[2] == table]
        if owners:
            owner = owners[0].partition(".")[0]
            return f'the key "{table}" stands outside its table; write it under [{owner}].'
        return f'unknown key "{table}" outside of any table; the tables are {", ".join(tables)}.'
    guess = nearest(table, tables)
    hint = f"did you mean [{guess}]?" if guess else f"the tables are {', '.join(tables)}."
    return f"unknown table [{table}]; {hint}"


def _unknown_key(table: str, name: str) -> str:
    specs = field_table(TrainConfig)
    elsewhere = [spec.table for spec in specs.values() if spec.name == name]
    if elsewhere:
        return f'unknown key "{name}"; it belongs to [{elsewhere[0]}].'
    own = [spec.name for spec in specs.values() if spec.table == table]
    guess = nearest(name, own)
    if guess:
        return f'unknown key "{name}"; did you mean "{guess}"?'
    far = nearest(name, [spec.name for spec in specs.values()])
    if far:
        owner = next(spec.table for spec in specs.values() if spec.name == far)
        return f'unknown key "{name}"; did you mean "{far}" of [{owner}]?'
    return f'unknown key "{name}"; the keys are {", ".join(own)}.'


def read_variables(variables: Mapping[str, str]) -> Settings:
    """Read settings from variables like MDS_PARALLEL__TP_SIZE; others are left alone.

    Args:
        variables: the environment, handed over by launch.

    Raises:
        InputError: If a variable names a table but no key of it, or its text is of the wrong type.
    """
    by_name = {spec.variable: spec for spec in field_table(TrainConfig).values()}
    settings: dict[str, Setting] = {}
    for name, text in variables.items():
        if not name.startswith(_VARIABLE_PREFIX) or "__" not in name:
            continue
        spec = by_name.get(name)
        if spec is None:
            guess = nearest(name, by_name)
            hint = f"did you mean {guess}?" if guess else "unset it."
            raise InputError(f"Environment variable {name}: no such setting; {hint}")
        try:
            value = from_text(spec.annotation, text)
        except TypeError as error:
            raise InputError(
                f"Environment variable {name} is {text!r}, but it must be "
                f"{type_name(spec.annotation)}."
            ) from error
        settings[spec.key] = Setting(value=value, origin=f"environment {name}")
    return settings


def build(settings: Settings) -> TrainConfig:
    """Make the configuration; fields that no layer sets take their defaults.

    Raises:
        InputError: If a required field is missing.
        ValueError: If the values contradict each other.
    """
    specs = field_table(TrainConfig)
    missing = [spec for key, spec in specs.items() if spec.required and key not in settings]
    if missing:
        raise InputError(_missing_sentence(missing))
    tables: dict[str, Any] = {}
    for table, table_type in _table_types().items():
        own = {key: item.value for key, item in settings.items() if specs[key].table == table}
        tables[table] = table_type(**{specs[key].name: value for key, value in own.items()})
    return TrainConfig(**tables)


def _table_types() -> dict[str, type]:
    return typing.get_type_hints(TrainConfig)


def _missing_sentence(missing: list[FieldSpec]) -> str:
    keys = ", ".join(spec.key for spec in missing)
    first = missing[0]
    verb = "is" if len(missing) == 1 else "are"
    return (
        f"{keys} {verb} not set and {'has' if len(missing) == 1 else 'have'} no default; write "
        f"`{first.name} = ...` under [{first.table}] in the file, or {first.flag} on the "
        "command line."
    )


def document_with_origins(settings: Settings) -> str:
    """Return the whole configuration as TOML; a comment on each line says where it is from."""
    rows: list[tuple[str, str]] = []
    table = ""
    for key, spec in field_table(TrainConfig).items():
        if spec.table != table:
            table = spec.table
            rows.append(("" if len(rows) == 0 else "\n", ""))
            rows.append((f"[{table}]", ""))
        setting = settings.get(key)
        value = setting.value if setting else spec.default
        origin = setting.origin if setting else "default"
        rows.append(_row(spec, value=value, origin=origin))
    width = min(48, max(len(left) for left, _ in rows))
    lines = [f"{left:<{width}}  # {origin}" if origin else left.strip() for left, origin in rows]
    return "\n".join(lines).strip() + "\n"


def given_settings(settings: Settings) -> str:
    """Return only what is set as TOML; a comment on each line says where it is from."""
    rows: list[tuple[str, str]] = []
    table = ""
    for key, spec in field_table(TrainConfig).items():
        setting = settings.get(key)
        if setting is None or setting.value is None or setting.value == ():
            continue
        if spec.table != table:
            table = spec.table
            rows.append(("\n" if rows else "", ""))
            rows.append((f"[{table}]", ""))
        rows.append(_row(spec, value=setting.value, origin=setting.origin))
    width = min(48, max((len(left) for left, _ in rows), default=0))
    lines = [f"{left:<{width}}  # {origin}" if origin else left.strip() for left, origin in rows]
    return "\n".join(lines).strip() + "\n"


def _row(spec: FieldSpec, *, value: object, origin: str) -> tuple[str, str]:
    if spec.required and origin == "default":
        return f"# {spec.name} =", "required, not set"
    if value is None:
        return f"# {spec.name} =", f"not set, {origin}"
    return f"{spec.name} = {toml_value(value)}", origin


def toml_value(value: object) -> str:
    """Write a value as TOML has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)
