"""The configuration's fields as a flat table: key, type, default, documentation.

Everything that reads or shows configuration (TOML, environment, command line, help,
`--print-config`) walks this table and so agrees.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union

__all__ = [
    "REQUIRED",
    "FieldSpec",
    "accepts_none",
    "as_declared",
    "field_table",
    "from_text",
    "nearest",
    "type_name",
]

REQUIRED = dataclasses.MISSING
"""Default of a field that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One field of one table."""

    key: str
    """Table and name, like "parallel.tp_size"."""
    annotation: Any
    default: Any
    doc: str

    @property
    def table(self) -> str:
        """Name of the TOML table."""
        return self.key.partition(".")[0]

    @property
    def name(self) -> str:
        """Name of the key inside its table."""
        return self.key.partition(".")[2]

    @property
    def flag(self) -> str:
        """The option that sets the field on the command line."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that sets the field."""
        return "MDS_" + self.key.replace(".", "__").upper()

    @property
    def required(self) -> bool:
        """True where there is no default."""
        return self.default is REQUIRED

    @property
    def is_switch(self) -> bool:
        """True for a plain yes or no."""
        return self.annotation is bool


@functools.cache
def field_table(schema: type) -> Mapping[str, FieldSpec]:
    """List every leaf field of a dataclass of dataclasses, by key, in the order of declaration."""
    specs: dict[str, FieldSpec] = {}
    for table, table_type in typing.get_type_hints(schema).items():
        hints = typing.get_type_hints(table_type)
        docs = _field_docs(table_type)
        for field in dataclasses.fields(table_type):
            key = f"{table}.{field.name}"
            specs[key] = FieldSpec(
                key=key,
                annotation=hints[field.name],
                default=_default_of(field),
                doc=docs.get(field.name, ""),
            )
    return types.MappingProxyType(specs)


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate most like ``word``, or an empty string where none is near."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return found[0] if found else ""


def type_name(annotation: object) -> str:
    """Say in words what a field takes, for messages and help."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if _is_union(annotation):
        return " or ".join(type_name(part) for part in arguments if part is not types.NoneType)
    if origin is tuple:
        return "a list of " + type_name(arguments[0])
    names = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
    }
    return names.get(typing.cast("type", annotation), str(annotation))


def as_declared(annotation: object, value: object) -> Any:
    """Bring a value as TOML gives it into the declared type.

    Raises:
        TypeError: If the value is of another type; whole numbers pass where a number is asked for.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_union(annotation):
        return _first_that_fits(arguments, value)
    if origin is Literal:
        if value in arguments:
            return value
        raise TypeError
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(as_declared(arguments[0], item) for item in value)
    if annotation is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if annotation is int and isinstance(value, float) and value.is_integer():
        raise TypeError  # 12.0 layers is a slip worth naming
    if isinstance(annotation, type) and type(value) is annotation:
        return value
    raise TypeError


def from_text(annotation: object, text: str) -> Any:
    """Read a value from an environment variable or an old flag.

    Raises:
        TypeError: If the text is not of the declared type.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if _is_union(annotation):
        if text.strip().lower() in ("none", "") and types.NoneType in arguments:
            return None
        return _first_text_that_fits(arguments, text)
    if origin is tuple:
        return tuple(from_text(arguments[0], part) for part in text.split(","))
    if annotation is bool:
        return _boolean(text)
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError as error:
            raise TypeError from error
    return as_declared(annotation, text)


def _boolean(text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    try:
        return words[text.strip().lower()]
    except KeyError as error:
        raise TypeError from error


def _first_that_fits(annotations: Iterable[object], value: object) -> Any:
    choices = tuple(annotations)
    if types.NoneType in choices and (value is None or (value == "none" and str not in choices)):
        return None  # TOML has no null; "none" takes back what a base file has set
    for choice in choices:
        if choice is types.NoneType:
            continue
        try:
            return as_declared(choice, value)
        except TypeError:
            continue
    raise TypeError


def _first_text_that_fits(annotations: Iterable[object], text: str) -> Any:
    for choice in annotations:
        if choice is types.NoneType:
            continue
        try:
            return from_text(choice, text)
        except TypeError:
            continue
    raise TypeError


def accepts_none(annotation: object) -> bool:
    """Whether a field may be left unset."""
    return _is_union(annotation) and types.NoneType in typing.get_args(annotation)


def _is_union(annotation: object) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _field_docs(table: type) -> dict[str, str]:
    """Collect the texts that stand under the fields of a dataclass and of those that it extends."""
    docs: dict[str, str] = {}
    for owner in reversed(table.__mro__):
        if dataclasses.is_dataclass(owner):
            docs |= _docs_of_one_class(owner)
    return docs


def _docs_of_one_class(owner: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError):  # no source beside the byte code
        return {}
    body = typing.cast("ast.ClassDef", tree.body[0]).body
    docs: dict[str, str] = {}
    for statement, follower in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(follower, ast.Expr)
            and isinstance(follower.value, ast.Constant)
            and isinstance(follower.value.value, str)
        ):
            docs[statement.target.id] = " ".join(follower.value.value.split())
    return docs
