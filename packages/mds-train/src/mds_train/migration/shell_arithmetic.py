"""Whole-number arithmetic as ``$(( ))`` has it, by a small parser of its own."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

__all__ = ["Unknown", "arithmetic"]


class Unknown(ValueError):  # noqa: N818 (a state, not a fault)
    """The value depends on something that only a running script knows."""


_TOKEN = re.compile(r"\s*(0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|\*\*|<<|>>|<=|>=|==|!=|&&|\|\||.)")
_LEVELS: tuple[tuple[str, ...], ...] = (
    ("||",),
    ("&&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_LARGEST_SHIFT = 62


def _divide(left: int, right: int) -> int:
    if right == 0:
        raise Unknown("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _shift(left: int, right: int) -> int:
    if not 0 <= right <= _LARGEST_SHIFT:
        raise Unknown(f"a shift by {right}")
    return left << right


def _power(left: int, right: int) -> int:
    if not 0 <= right <= _LARGEST_SHIFT:
        raise Unknown(f"a power of {right}")
    return int(left**right)


_APPLY: dict[str, Callable[[int, int], int]] = {
    "||": lambda a, b: int(bool(a or b)),
    "&&": lambda a, b: int(bool(a and b)),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "<<": _shift,
    ">>": operator.rshift,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _divide,
    "%": lambda a, b: a - b * _divide(a, b),
}


def arithmetic(text: str, *, value_of: Callable[[str], str]) -> int:
    """The value of an expression.

    Args:
        text: What stands between the brackets, with ``$`` expansions done.
        value_of: The text of a variable.

    Raises:
        Unknown: If it holds something that is no whole number here.
    """
    parser = _Expression([token for token in _TOKEN.findall(text) if token.strip()], value_of)
    value = parser.ternary()
    if parser.tokens:
        raise Unknown(f"{text.strip()!r} is no plain arithmetic")
    return value


class _Expression:
    def __init__(self, tokens: list[str], value_of: Callable[[str], str]) -> None:
        self.tokens = tokens
        self._value_of = value_of

    def _accept(self, *tokens: str) -> str:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in tokens else ""

    def ternary(self) -> int:
        condition = self._level(0)
        if not self._accept("?"):
            return condition
        first = self.ternary()
        if not self._accept(":"):
            raise Unknown("a ? without its :")
        second = self.ternary()
        return first if condition else second

    def _level(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._power()
        value = self._level(level + 1)
        while sign := self._accept(*_LEVELS[level]):
            value = _APPLY[sign](value, self._level(level + 1))
        return value

    def _power(self) -> int:
        base = self._unary()
        return _power(base, self._power()) if self._accept("**") else base

    def _unary(self) -> int:
        if sign := self._accept("-", "+", "!"):
            value = self._unary()
            return {"-": -value, "+": value, "!": int(not value)}[sign]
        if self._accept("("):
            value = self.ternary()
            if not self._accept(")"):
                raise Unknown("a bracket is not closed")
            return value
        if not self.tokens:
            raise Unknown("an expression ends too early")
        return self._number(self.tokens.pop(0))

    def _number(self, token: str) -> int:
        text = token
        if token[0].isalpha() or token[0] == "_":
            if self.tokens[:1] == ["="]:
                raise Unknown("an assignment")
            text = self._value_of(token).strip() or "0"
        try:
            return int(text, 0 if text.lower().startswith("0x") else 10)
        except ValueError as error:
            raise Unknown(f"{text!r} is no whole number") from error
