"""Parse the expressions of a chat template into closures over a scope. Pratt style, no Python code.

The grammar is the part of Jinja's that templates of models use: names, members, slices, calls of
a few functions and methods, filters, tests, comparisons, arithmetic, conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from mds_data.chat.values import (
    BINARY,
    FILTERS,
    TESTS,
    UNDEFINED,
    TemplateError,
    attribute,
    item,
    method,
)

__all__ = ["Evaluate", "Scope", "parse_expression"]

Scope = Mapping[str, Any]
Evaluate = Callable[[Scope], Any]

_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d+\.\d+|\d+)
    | (?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")
    | (?P<name>[A-Za-z_]\w*)
    | (?P<sign>==|!=|<=|>=|//|[-+*/%~<>|.,:()\[\]{}=])
    )""",
    re.VERBOSE | re.DOTALL,
)
_LEVELS = (
    ("==", "!=", "<", "<=", ">", ">=", "in", "not in"),
    ("+", "-"),
    ("~",),
    ("*", "/", "//", "%"),
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_CONSTANTS = {
    "true": True,
    "false": False,
    "none": None,
    "True": True,
    "False": False,
    "None": None,
}
_DEEPEST = 64


def parse_expression(source: str) -> Evaluate:
    """Parse one expression.

    Raises:
        TemplateError: It is broken, or uses what is not supported.
    """
    parser = _Parser(source)
    found = parser.condition()
    parser.expect_end()
    return found


class _Parser:
    """A cursor over the tokens of one expression."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._tokens = _tokens(source)
        self._place = 0
        self._depth = 0

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")

    def _take(self) -> tuple[str, str]:
        token = self._peek()
        self._place += 1
        return token

    def _accept(self, *words: str) -> str | None:
        kind, word = self._peek()
        if kind in ("sign", "name") and word in words:
            self._place += 1
            return word
        return None

    def _expect(self, word: str) -> None:
        if self._accept(word) is None:
            raise self._error(f"{word!r} is missing before {self._peek()[1]!r}")

    def _error(self, reason: str) -> TemplateError:
        return TemplateError(f"the chat template's expression {self._source.strip()!r}: {reason}")

    def expect_end(self) -> None:
        """Refuse what follows the expression."""
        if self._peek()[0] != "end":
            raise self._error(f"{self._peek()[1]!r} is not supported here")

    def condition(self) -> Evaluate:
        """``a if b else c``, and everything that binds tighter."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error("is nested too deeply")
        value = self._either()
        if self._accept("if"):
            test = self._either()
            other: Evaluate = self.condition() if self._accept("else") else lambda _: UNDEFINED
            self._depth -= 1
            return lambda scope: value(scope) if test(scope) else other(scope)
        self._depth -= 1
        return value

    def _either(self) -> Evaluate:
        left = self._both()
        while self._accept("or"):
            left = _or(left, self._both())
        return left

    def _both(self) -> Evaluate:
        left = self._negation()
        while self._accept("and"):
            left = _and(left, self._negation())
        return left

    def _negation(self) -> Evaluate:
        if self._accept("not"):
            value = self._negation()
            return lambda scope: not value(scope)
        return self._binary(0)

    def _binary(self, level: int) -> Evaluate:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while (word := self._operator(level)) is not None:
            left = _apply(BINARY[word], left, self._binary(level + 1))
        return left

    def _operator(self, level: int) -> str | None:
        if level == 0 and self._peek() == ("name", "not"):
            following = self._tokens[self._place + 1 : self._place + 2]
            if following == [("name", "in")]:
                self._place += 2
                return "not in"
        return self._accept(*_LEVELS[level])

    def _unary(self) -> Evaluate:
        if self._accept("-"):
            value = self._unary()
            return lambda scope: -value(scope)
        return self._tested(self._postfix(self._atom()))

    def _tested(self, value: Evaluate) -> Evaluate:
        """Filters and tests after a value."""
        while True:
            if self._accept("|"):
                value = self._filtered(value)
            elif self._accept("is"):
                value = self._test(value)
            else:
                return value

    def _filtered(self, value: Evaluate) -> Evaluate:
        name = self._take()[1]
        if name not in FILTERS:
            raise self._error(f"the filter {name!r} is not supported")
        arguments = self._arguments() if self._accept("(") else _no_arguments
        return _call(lambda _: FILTERS[name], arguments, first=value)

    def _test(self, value: Evaluate) -> Evaluate:
        negated = self._accept("not") is not None
        name = self._take()[1]
        if name not in TESTS:
            raise self._error(f"the test {name!r} is not supported")
        arguments = self._arguments() if self._accept("(") else _no_arguments
        found = _call(lambda _: TESTS[name], arguments, first=value)
        return (lambda scope: not found(scope)) if negated else found

    def _postfix(self, value: Evaluate) -> Evaluate:
        while True:
            if self._accept("."):
                kind, name = self._take()
                if kind != "name":
                    raise self._error("a name is missing after the dot")
                value = self._member(value, name)
            elif self._accept("["):
                value = self._subscript(value)
            else:
                return value

    def _member(self, value: Evaluate, name: str) -> Evaluate:
        if self._accept("("):
            return _call(lambda scope: method(value(scope), name), self._arguments())
        return lambda scope: attribute(value(scope), name)

    def _subscript(self, value: Evaluate) -> Evaluate:
        parts: list[Evaluate | None] = [None]
        while self._accept("]") is None:
            if self._accept(":"):
                parts.append(None)
            else:
                parts[-1] = self.condition()
        if len(parts) == 1:
            key = parts[0]
            if key is None:
                raise self._error("the brackets are empty")
            return lambda scope: item(value(scope), key(scope))
        return lambda scope: item(
            value(scope), slice(*(part(scope) if part else None for part in parts))
        )

    def _atom(self) -> Evaluate:
        kind, word = self._take()
        if kind == "number":
            number = float(word) if "." in word else int(word)
            return lambda _: number
        if kind == "string":
            return self._strings(word)
        if kind == "name":
            return self._name(word)
        if word == "(":
            return self._parenthesis()
        if word == "[":
            elements = self._sequence("]")
            return lambda scope: [element(scope) for element in elements]
        if word == "{":
            return self._mapping()
        raise self._error(f"{word or 'the end'!r} is not expected")

    def _strings(self, word: str) -> Evaluate:
        value = _unescaped(word)
        while self._peek()[0] == "string":  # neighbours are joined
            value += _unescaped(self._take()[1])
        return lambda _: value

    def _name(self, name: str) -> Evaluate:
        if name in _CONSTANTS:
            constant = _CONSTANTS[name]
            return lambda _: constant
        if self._accept("("):
            return _call(lambda scope: _function(scope, name), self._arguments())
        return lambda scope: scope.get(name, UNDEFINED)

    def _parenthesis(self) -> Evaluate:
        elements = self._sequence(")")
        if len(elements) == 1:
            return elements[0]
        return lambda scope: [element(scope) for element in elements]

    def _sequence(self, end: str) -> list[Evaluate]:
        elements: list[Evaluate] = []
        while self._accept(end) is None:
            elements.append(self.condition())
            if self._accept(",") is None:
                self._expect(end)
                break
        return elements

    def _mapping(self) -> Evaluate:
        pairs: list[tuple[Evaluate, Evaluate]] = []
        while self._accept("}") is None:
            key = self.condition()
            self._expect(":")
            pairs.append((key, self.condition()))
            if self._accept(",") is None:
                self._expect("}")
                break
        return lambda scope: {key(scope): value(scope) for key, value in pairs}

    def _arguments(self) -> Callable[[Scope], tuple[list[Any], dict[str, Any]]]:
        given: list[Evaluate] = []
        named: dict[str, Evaluate] = {}
        while self._accept(")") is None:
            if self._tokens[self._place + 1 : self._place + 2] == [("sign", "=")]:
                name = self._take()[1]
                self._expect("=")
                named[name] = self.condition()
            else:
                given.append(self.condition())
            if self._accept(",") is None:
                self._expect(")")
                break
        return lambda scope: (
            [value(scope) for value in given],
            {name: value(scope) for name, value in named.items()},
        )


def _tokens(source: str) -> list[tuple[str, str]]:
    found, place = [], 0
    source = source.rstrip()
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None or match.lastgroup is None:
            raise TemplateError(
                f"the chat template's expression {source.strip()!r}: {source[place]!r} is not "
                f"supported"
            )
        found.append((match.lastgroup, match[match.lastgroup]))
        place = match.end()
    return found


def _unescaped(word: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPES.get(match[1], match[1]), word[1:-1])


def _no_arguments(_: Scope) -> tuple[list[Any], dict[str, Any]]:
    return [], {}


def _function(scope: Scope, name: str) -> Callable[..., Any]:
    found = scope.get(name)
    if not callable(found):
        raise TemplateError(f"the chat template calls {name}(), which is not supported")
    function: Callable[..., Any] = found
    return function


def _call(
    function: Callable[[Scope], Callable[..., Any]],
    arguments: Callable[[Scope], tuple[list[Any], dict[str, Any]]],
    *,
    first: Evaluate | None = None,
) -> Evaluate:
    def call(scope: Scope) -> Any:
        given, named = arguments(scope)
        if first is not None:
            given = [first(scope), *given]
        try:
            return function(scope)(*given, **named)
        except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
            if isinstance(error, TemplateError):
                raise
            raise TemplateError(f"the chat template can't be rendered: {error}") from None

    return call


def _apply(operation: Callable[[Any, Any], Any], left: Evaluate, right: Evaluate) -> Evaluate:
    def apply(scope: Scope) -> Any:
        try:
            return operation(left(scope), right(scope))
        except (TypeError, ArithmeticError) as error:
            raise TemplateError(f"the chat template can't be rendered: {error}") from None

    return apply


def _or(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda scope: left(scope) or right(scope)


def _and(left: Evaluate, right: Evaluate) -> Evaluate:
    return lambda scope: left(scope) and right(scope)
