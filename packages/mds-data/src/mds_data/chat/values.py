"""The values that a chat template may touch, and what it may do with them. Nothing else exists."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mds_data.errors import DataError

__all__ = [
    "BINARY",
    "FILTERS",
    "TESTS",
    "UNDEFINED",
    "Namespace",
    "TemplateError",
    "Undefined",
    "attribute",
    "item",
    "method",
    "text",
]

_LONGEST = 2**24
"""Characters of a string that a template makes."""
_LONGEST_LIST = 2**20
"""Characters, about, of a list or mapping that it writes out."""


class TemplateError(DataError):
    """A chat template uses what is not supported here, or refused the conversation."""


class Undefined:
    """What a name or key that is not there gives: empty, false, and equal to nothing else."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return ""


UNDEFINED = Undefined()


class Namespace(dict[str, Any]):
    """What ``namespace(...)`` gives: a value whose members can be set inside a loop."""


def text(value: object) -> str:
    """A value as a template prints it."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float | Undefined):
        return str(value)
    if isinstance(value, list | dict | tuple):
        return str(_bounded(value))
    raise TemplateError(f"the chat template prints a {type(value).__name__}")


def attribute(value: object, name: str) -> object:
    """``value.name``: a member of a mapping."""
    if isinstance(value, Mapping):
        return value.get(name, UNDEFINED)
    if isinstance(value, Undefined):
        raise TemplateError(f"the chat template asks for .{name} of something undefined")
    return UNDEFINED


def item(value: object, key: object) -> object:
    """``value[key]``: a member, an element or a slice."""
    if isinstance(value, Mapping):
        return value.get(key, UNDEFINED) if isinstance(key, str | int) else UNDEFINED
    if isinstance(value, str | list | tuple) and isinstance(key, int | slice):
        try:
            return value[key]
        except IndexError:
            return UNDEFINED
    if isinstance(value, Undefined):
        raise TemplateError(f"the chat template asks for [{key!r}] of something undefined")
    return UNDEFINED


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(_bounded(value), ensure_ascii=False, indent=indent)


def _bounded(value: object) -> object:
    """The value, if written out it stays short: lists that hold a list twice grow like bombs."""
    waiting, written = [value], 0
    while waiting:
        each = waiting.pop()
        written += len(each) + 2 if isinstance(each, str) else 2
        if written > _LONGEST_LIST:
            raise TemplateError("the chat template writes out a list without end")
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each
    return value


def _default(value: object, other: object = "", *flags: bool) -> object:
    missing = isinstance(value, Undefined) or (any(flags) and not value)
    return other if missing else value


def _joined(value: Sequence[object], between: str = "") -> str:
    parts = list(map(text, value))
    _check_length(sum(map(len, parts)) + len(between) * len(parts))
    return between.join(parts)


def _replaced(value: str, old: str, new: str) -> str:
    _check_length(len(value) + value.count(old) * len(new))
    return value.replace(old, new)


def _check_length(size: int) -> None:
    if size > _LONGEST:
        raise TemplateError(f"the chat template makes a text of {size} characters")


def _trim(value: object, letters: str | None = None) -> str:
    return text(value).strip(letters)


FILTERS: dict[str, Callable[..., object]] = {
    "trim": _trim,
    "tojson": _json,
    "length": len,
    "count": len,
    "upper": str.upper,
    "lower": str.lower,
    "capitalize": str.capitalize,
    "title": str.title,
    "first": lambda value: next(iter(value), UNDEFINED),
    "last": lambda value: value[-1] if value else UNDEFINED,
    "join": _joined,
    "list": list,
    "string": text,
    "int": int,
    "safe": lambda value: value,
    "items": lambda value: list(value.items()),
    "default": _default,
    "replace": _replaced,
}

TESTS: dict[str, Callable[..., bool]] = {
    "defined": lambda value: not isinstance(value, Undefined),
    "undefined": lambda value: isinstance(value, Undefined),
    "none": lambda value: value is None,
    "string": lambda value: isinstance(value, str),
    "mapping": lambda value: isinstance(value, Mapping),
    "iterable": lambda value: isinstance(value, str | list | tuple | Mapping),
    "sequence": lambda value: isinstance(value, str | list | tuple),
    "number": lambda value: isinstance(value, int | float),
    "true": lambda value: value is True,
    "false": lambda value: value is False,
    "boolean": lambda value: isinstance(value, bool),
    "odd": lambda value: value % 2 == 1,
    "even": lambda value: value % 2 == 0,
    "equalto": operator.eq,
    "in": lambda value, other: value in other,
}

_CUTS = {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit"}
_LOOKS = {"startswith", "endswith", "find", "count", "splitlines"}
_STRING_METHODS = frozenset(_CUTS | _LOOKS | {"upper", "lower", "title", "capitalize"})
_MAPPING_METHODS = frozenset(("get", "items", "keys", "values"))


def method(value: object, name: str) -> Callable[..., object]:
    """``value.name(...)``: one of the harmless methods of strings and mappings.

    Raises:
        TemplateError: It is none of them.
    """
    if isinstance(value, str) and name == "replace":
        return lambda old, new: _replaced(value, old, new)
    allowed = isinstance(value, str) and name in _STRING_METHODS
    if allowed or (isinstance(value, Mapping) and name in _MAPPING_METHODS):
        found = getattr(value, name)
        return lambda *given, **named: _short(_listed(found(*given, **named)))
    raise TemplateError(
        f"the chat template calls .{name}() of a {type(value).__name__}, which is not supported"
    )


def _listed(value: Any) -> Any:
    """Views of a mapping as lists, so that a template may index and measure them."""
    is_plain = value is None or isinstance(value, str | bool | int | float | list | Mapping)
    return value if is_plain or not hasattr(value, "__iter__") else list(value)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        _check_length(len(value))
    return value


def _added(left: Any, right: Any) -> Any:
    if isinstance(left, str) != isinstance(right, str):
        raise TemplateError("the chat template adds a text and something else")
    if isinstance(left, str | list):
        _check_length(len(left) + len(right))
    return left + right


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left * right
    raise TemplateError("the chat template multiplies what are not numbers")


def _modulo(left: Any, right: Any) -> Any:
    if isinstance(left, int | float) and isinstance(right, int | float):
        return left % right
    raise TemplateError("the chat template formats a text by %, which is not supported")


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: False if isinstance(right, Undefined) else left in right,
    "not in": lambda left, right: True if isinstance(right, Undefined) else left not in right,
    "+": _added,
    "-": operator.sub,
    "~": lambda left, right: _short(text(left) + text(right)),
    "*": _times,
    "//": operator.floordiv,
    "/": operator.truediv,
    "%": _modulo,
}
