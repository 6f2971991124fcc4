"""The command line's part of the configuration: `--parallel.tp-size 2` and Megatron's old names.

Parsed by tyro.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from mds_train.config.fields import FieldSpec, accepts_none, field_table, nearest, type_name
from mds_train.config.loading import Setting, Settings
from mds_train.config.megatron_flags import OLD_FLAGS, OldSettings, is_old_flag, take_old_flags
from mds_train.config.schema import TrainConfig
from mds_train.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["Overrides", "add_to_parser", "print_help", "read_overrides"]

_ORIGIN = "command line"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the command line says about the configuration."""

    settings: Settings
    old: OldSettings
    """What came by Megatron's names; some of it is resolved after merging with other settings."""


def read_overrides(arguments: Sequence[str], *, prog: str) -> Overrides:
    """Read `--table.field value` options and Megatron's flat flags.

    Raises:
        UsageError: If an option is unknown (the message names the nearest) or is refused.
        SystemExit: If a value does not fit its option; tyro has then said so.
    """
    old, rest = take_old_flags(arguments)
    normal = _spell_out(rest)
    chosen = _chosen_fields(normal)
    values = _parse(chosen, arguments=normal, prog=prog) if chosen else {}
    settings = {
        key: Setting(value=value, origin=f"{_ORIGIN} {field_table(TrainConfig)[key].flag}")
        for key, value in values.items()
    }
    return Overrides(settings=settings, old=old)


def print_help(*, prog: str, settings: Settings) -> None:
    """Print every option with its documentation and the value that it has now."""
    import tyro

    defaults = {
        spec.key: settings[spec.key].value if spec.key in settings else spec.default
        for spec in field_table(TrainConfig).values()
    }
    mirror = _mirror(field_table(TrainConfig).values(), defaults=defaults)
    try:
        tyro.cli(mirror, args=["--help"], prog=prog, description=_HELP, config=_tyro_config())
    except SystemExit:
        return


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    """Add the option of every field to an argparse parser, for listings of all flags."""
    for table, specs in _by_table(field_table(TrainConfig).values()).items():
        group = parser.add_argument_group(f"[{table}]")
        for spec in specs:
            group.add_argument(
                spec.flag, metavar=type_name(spec.annotation), help=spec.doc.replace("%", "%%")
            )


_HELP = (
    "Options that override the configuration file. Megatron's old names "
    "(--tensor-model-parallel-size, --lr-decay-style, ...) are understood as well."
)


def _tyro_config() -> tuple[Any, ...]:
    import tyro

    return (tyro.conf.FlagConversionOff,)


def _spell_out(arguments: Sequence[str]) -> list[str]:
    """Bring options into one form: dashes, value apart, a value for switches (`--watch.no-x`)."""
    flags = _flags()
    normal: list[str] = []
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            normal.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        positive = name.replace(".no-", ".", 1)
        if name not in flags and positive in flags and flags[positive].is_switch:
            normal += [positive, "False"]
        elif name in flags and flags[name].is_switch and not equals:
            follower = arguments[index + 1] if index + 1 < len(arguments) else "--"
            normal += [name] if follower.lower() in ("true", "false") else [name, "True"]
        else:
            normal += [name, value] if equals else [name]
    return [_as_tyro_spells(normal, index) for index in range(len(normal))]


def _as_tyro_spells(arguments: Sequence[str], index: int) -> str:
    """Capitalise true, false and none, which TOML and people write small."""
    word = arguments[index]
    spec = _flags().get(arguments[index - 1]) if index else None
    if spec is None or word.lower() not in ("true", "false", "none"):
        return word
    takes_word = spec.is_switch if word.lower() != "none" else accepts_none(spec.annotation)
    return word.capitalize() if takes_word else word


def _chosen_fields(arguments: Sequence[str]) -> list[FieldSpec]:
    """List the fields that the options name.

    Raises:
        UsageError: If an option is unknown.
    """
    flags = _flags()
    chosen: dict[str, FieldSpec] = {}
    for argument in arguments:
        if not argument.startswith("--"):
            continue
        if argument not in flags:
            raise UsageError(_unknown_option(argument))
        chosen[argument] = flags[argument]
    if arguments and not arguments[0].startswith("--"):
        raise UsageError(
            f"Unexpected argument {arguments[0]!r}; options look like --parallel.tp-size 2."
        )
    return list(chosen.values())


def _unknown_option(option: str) -> str:
    guess = nearest(option, [*_flags(), *(name for flag in OLD_FLAGS for name in flag.names)])
    by_name = [flag for flag in _flags() if flag.partition(".")[2] == option.removeprefix("--")]
    guess = by_name[0] if by_name and not is_old_flag(option) else guess
    hint = f"did you mean {guess}?" if guess else "`mds-train run --help` lists all of them."
    return f"Unknown option {option}; {hint}"


def _parse(chosen: Sequence[FieldSpec], *, arguments: Sequence[str], prog: str) -> dict[str, Any]:
    import tyro

    parsed: Any = tyro.cli(
        _mirror(chosen, defaults={}), args=list(arguments), prog=prog, config=_tyro_config()
    )
    return {spec.key: getattr(getattr(parsed, spec.table), spec.name) for spec in chosen}


def _mirror(specs: Iterable[FieldSpec], *, defaults: Mapping[str, Any]) -> type:
    """Build a dataclass of dataclasses that has only these fields and none of the checks.

    So tyro parses what was typed and nothing else, and the real configuration is built once,
    from all layers.
    """
    tables = []
    for table, own in _by_table(specs).items():
        fields = [_mirror_field(spec, defaults=defaults) for spec in own]
        name = f"{table.capitalize()}Overrides"
        tables.append((table, dataclasses.make_dataclass(name, fields, kw_only=True)))
    return dataclasses.make_dataclass("Configuration", tables, kw_only=True)


def _mirror_field(spec: FieldSpec, *, defaults: Mapping[str, Any]) -> tuple[str, Any, Any]:
    import tyro

    annotation: Any = Annotated[spec.annotation, tyro.conf.arg(help=spec.doc)]
    default = defaults.get(spec.key, dataclasses.MISSING)
    return spec.name, annotation, dataclasses.field(default=default)


def _by_table(specs: Iterable[FieldSpec]) -> dict[str, list[FieldSpec]]:
    tables: dict[str, list[FieldSpec]] = {}
    for spec in specs:
        tables.setdefault(spec.table, []).append(spec)
    return tables


@functools.cache
def _flags() -> Mapping[str, FieldSpec]:
    return {spec.flag: spec for spec in field_table(TrainConfig).values()}
