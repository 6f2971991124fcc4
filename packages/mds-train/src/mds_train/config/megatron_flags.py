"""Takes Megatron's flat flags out of a command line and says what they set."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mds_train.config.fields import FieldSpec, field_table, from_text, type_name
from mds_train.config.loading import Setting, Settings
from mds_train.config.megatron_kinds import (
    Derived,
    Ignored,
    Many,
    OldFlag,
    Only,
    Refused,
    Switch,
    Value,
)
from mds_train.config.megatron_table import OLD_FLAGS
from mds_train.config.schema import TrainConfig
from mds_train.errors import UsageError

__all__ = [
    "OLD_FLAGS",
    "OldSettings",
    "Outcome",
    "is_old_flag",
    "read_flags",
    "resolve_old_flags",
    "take_old_flags",
]

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OldSettings:
    """What Megatron's flags of one command line set."""

    settings: Settings
    deferred: tuple[tuple[str, Derived, Any], ...] = ()
    """Flags whose field depends on other settings: name as typed, flag, number or numbers."""


def is_old_flag(argument: str) -> bool:
    """Whether this word of a command line is a flag of the original."""
    return _normal(argument) in _by_name()


def take_old_flags(arguments: Sequence[str]) -> tuple[OldSettings, list[str]]:
    """Split a command line into what Megatron's flags say and the arguments that are left.

    Flags that do nothing are warned about, with the reason.

    Raises:
        UsageError: If a flag is refused, lacks its value, or has one of the wrong type.
    """
    settings: dict[str, Setting] = {}
    deferred: list[tuple[str, Derived, Any]] = []
    rest: list[str] = []
    for outcome in read_flags(arguments):
        if outcome.error is not None:
            raise outcome.error
        if outcome.remark:
            logger.warning("%s", outcome.remark)
        settings |= outcome.settings
        deferred += outcome.deferred
        rest += outcome.unknown
    return OldSettings(settings=settings, deferred=tuple(deferred)), rest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one flag."""

    typed: str
    values: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=dict)
    deferred: tuple[tuple[str, Derived, Any], ...] = ()
    remark: str = ""
    """A sentence: it does nothing here, or means something a little different."""
    is_idle: bool = False
    """It does nothing here."""
    error: UsageError | None = None
    unknown: tuple[str, ...] = ()
    """The word itself, where it is no flag of the original."""


def read_flags(arguments: Sequence[str]) -> Iterator[Outcome]:
    """Say of each flag of a command line what it does here; those that prevail come last."""
    words = list(arguments)
    names = frozenset(map(_normal, words))
    last: list[Outcome] = []
    while words:
        word = words.pop(0)
        flag = _by_name().get(_normal(word)) if word.startswith("--") else None
        if flag is None:
            yield Outcome(typed=word, unknown=(word,))
            continue
        values = _values_of(word, words=words)
        typed = word.partition("=")[0]
        try:
            outcome = _outcome(flag, typed=typed, values=values, names=names)
        except UsageError as error:
            outcome = Outcome(typed=typed, values=tuple(values), error=error)
        if flag.prevails:
            last.append(outcome)
        else:
            yield outcome
    yield from last


def resolve_old_flags(old: OldSettings, *, settings: Settings) -> Settings:
    """Add the flags that depend on other settings, as ``--eval-iters`` on the batch size.

    Raises:
        UsageError: If a setting that a flag depends on is nowhere given.
    """
    merged = dict(settings)
    found: dict[str, Setting] = {}
    for typed, flag, number in sorted(old.deferred, key=lambda item: _ORDER.get(item[1].key, 2)):
        needed = [_needed(typed, choice, settings=merged) for choice in flag.needs]
        value = flag.compute(number, *needed)
        if flag.smallest and flag.key in found:
            value = min(value, found[flag.key].value)
        fields = value if isinstance(value, Mapping) else {flag.key: value}
        origin = f"command line {typed.partition('=')[0]}"
        found |= {key: Setting(value=each, origin=origin) for key, each in fields.items()}
        merged |= found
    return merged


# What other flags are shares of comes first.
_ORDER = {"train.train_steps": 0, "schedule.decay_steps": 1}


def _needed(typed: str, choice: str, *, settings: Settings) -> Any:
    for key in choice.removesuffix("?").split("|"):
        if key in settings and settings[key].value is not None:
            return settings[key].value
    if choice.endswith("?"):
        return None
    raise UsageError(f"{typed} needs {choice.replace('|', ' or ')}, which is not set.")


def _outcome(flag: OldFlag, *, typed: str, values: Sequence[str], names: frozenset[str]) -> Outcome:
    origin, given = f"command line {typed}", tuple(values)
    match flag:
        case Refused():
            raise UsageError(f"{typed} is not taken over: {flag.instead}.")
        case Ignored():
            _expect(typed, values, count=1 if flag.takes_value else 0)
            remark = f"{typed} does nothing here: {flag.reason}."
            return Outcome(typed=typed, values=given, remark=remark, is_idle=True)
        case Only():
            _check_only(flag, typed=typed, values=values)
            return Outcome(typed=typed, values=given)
        case Many():
            fields = _several(flag, typed=typed, values=values)
        case Switch():
            _expect(typed, values, count=0)
            if flag.against in names:
                raise UsageError(f"{typed} and {flag.against} contradict each other; give one.")
            fields = dict(flag.values)
        case Derived():
            given_numbers = _numbers(typed, values) if flag.several else _number(typed, values)
            deferred = ((typed, flag, given_numbers),)
            return Outcome(typed=typed, values=given, deferred=deferred)
        case Value():
            fields = _one(flag, typed=typed, values=values)
        case _:
            raise AssertionError(flag)
    settings = {key: Setting(value=value, origin=origin) for key, value in fields.items()}
    note = flag.note if isinstance(flag, (Value, Switch)) else ""
    remark = f"{typed} sets {', '.join(fields)}: {note}." if note else ""
    return Outcome(typed=typed, values=given, settings=settings, remark=remark)


def _check_only(flag: Only, *, typed: str, values: Sequence[str]) -> None:
    _expect(typed, values, count=1)
    if values[0] not in flag.allowed:
        raise UsageError(
            f"{typed} is {values[0]!r}, but only {flag.allowed[0]!r} is taken over; {flag.instead}."
        )


def _one(flag: Value, *, typed: str, values: Sequence[str]) -> dict[str, Any]:
    _expect(typed, values, count=1)
    text = flag.convert(values[0]) if flag.convert else values[0]
    return {flag.key: _typed(flag.key, text, typed=typed)}


def _several(flag: Many, *, typed: str, values: Sequence[str]) -> Mapping[str, Any]:
    # Scripts hold all values in one quoted word as often as in several.
    words = [part for value in values for part in value.split()]
    try:
        return flag.read(words)
    except ValueError as error:
        raise UsageError(f"{typed} {error}.") from error


def _typed(key: str, text: str, *, typed: str) -> Any:
    spec: FieldSpec = field_table(TrainConfig)[key]
    try:
        return from_text(spec.annotation, text)
    except TypeError as error:
        raise UsageError(
            f"{typed} is {text!r}, but {key} must be {type_name(spec.annotation)}."
        ) from error


def _values_of(word: str, *, words: list[str]) -> list[str]:
    """Take the values that follow a flag off ``words``; negative numbers are values too."""
    _, equals, attached = word.partition("=")
    if equals:
        return [attached]
    values: list[str] = []
    while words and not words[0].startswith("--"):
        values.append(words.pop(0))
    return values


def _number(typed: str, values: Sequence[str]) -> float:
    _expect(typed, values, count=1)
    try:
        return float(values[0])
    except ValueError as error:
        raise UsageError(f"{typed} is {values[0]!r}, but it must be a number.") from error


def _numbers(typed: str, values: Sequence[str]) -> tuple[float, ...]:
    """Numbers that follow each other, in one quoted word or in several."""
    words = [part for value in values for part in value.split()]
    return tuple(_number(typed, [word]) for word in words or [""])


def _expect(typed: str, values: Sequence[str], *, count: int) -> None:
    if len(values) != count:
        wanted = "one value" if count else "no value"
        found = f"{len(values)} follow: {' '.join(values)}" if values else "none follows"
        raise UsageError(f"{typed} takes {wanted}, but {found}.")


def _normal(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


@functools.cache
def _by_name() -> Mapping[str, OldFlag]:
    return {_normal(name): flag for flag in OLD_FLAGS for name in flag.names}
