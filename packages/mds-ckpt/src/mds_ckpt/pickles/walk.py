"""Follow a pickle's opcodes to find every global that it would import, on broken streams too.

Unlike ``unpickle``, this refuses nothing and builds nothing: it keeps track of strings and names on
the stack, because a name may be put together from strings that were stored far away.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mds_ckpt.pickles.records import Global

__all__ = ["Walk", "walk"]

MOST_OPERATIONS = 1_000_000
_MARK = object()
_FIXED: Mapping[int, int] = MappingProxyType(
    {
        0x80: 1, 0x82: 1, 0x83: 2, 0x84: 4, 0x95: 8, ord("J"): 4, ord("K"): 1, ord("M"): 2,
        ord("G"): 8, ord("h"): 1, ord("j"): 4, ord("q"): 1, ord("r"): 4,
    }
)  # fmt: skip
"""Bytes of the argument, for opcodes whose argument has a fixed size."""
_COUNTED: Mapping[int, str] = MappingProxyType(
    {
        0x8A: "<B", 0x8B: "<I", ord("T"): "<I", ord("U"): "<B", ord("X"): "<I", 0x8C: "<B",
        0x8D: "<Q", ord("B"): "<I", ord("C"): "<B", 0x8E: "<Q", 0x96: "<Q",
    }
)  # fmt: skip
"""How the length is written, for opcodes whose argument says its length."""
_LINES: Mapping[int, int] = MappingProxyType(
    dict.fromkeys(map(ord, "FILSVPgp"), 1) | dict.fromkeys(map(ord, "ci"), 2)
)
_EFFECTS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {
        ord("0"): (1, 0), ord("N"): (0, 1), 0x88: (0, 1), 0x89: (0, 1), ord("I"): (0, 1),
        ord("L"): (0, 1), ord("F"): (0, 1), ord("J"): (0, 1), ord("K"): (0, 1), ord("M"): (0, 1),
        0x8A: (0, 1), 0x8B: (0, 1), ord("G"): (0, 1), ord("B"): (0, 1), ord("C"): (0, 1),
        0x8E: (0, 1), 0x96: (0, 1), 0x97: (0, 1), 0x98: (1, 1), ord("]"): (0, 1), ord("}"): (0, 1),
        ord(")"): (0, 1), 0x8F: (0, 1), 0x85: (1, 1), 0x86: (2, 1), 0x87: (3, 1), ord("a"): (1, 0),
        ord("s"): (2, 0), ord("b"): (1, 0), ord("Q"): (1, 1), ord("P"): (0, 1), 0x82: (0, 1),
        0x83: (0, 1), 0x84: (0, 1),
    }
)  # fmt: skip
"""How many values an opcode takes from the stack and puts on it, for those that need no more."""
_STRINGS = frozenset((ord("X"), 0x8C, 0x8D, ord("U"), ord("T"), ord("V"), ord("S")))
_TO_MARK = frozenset(map(ord, "tld1eou")) | {0x90, 0x91}
_NAMED = re.compile(rb"[ci]([A-Za-z_][\w.]{0,200})\n([A-Za-z_][\w.]{0,200})\n")


@dataclass(slots=True)
class Walk:
    """What a pickle names and calls, where it ended, and why if that was not its STOP."""

    named: dict[Global, bool]
    """Each global, and whether it is called."""
    end: int = 0
    fault: str | None = None


def walk(data: bytes, start: int = 0) -> Walk:
    """Follow the pickle that begins at ``start`` to its STOP, its end, or what can't be read."""
    walker = _Walker(data, start)
    try:
        walker.run()
    except (struct.error, ValueError, IndexError) as error:
        fault = str(error) or "it can't be read on"
        walker.result.fault = f"{fault} (at byte {walker.position})"
        for module, name in _NAMED.findall(data, walker.position):
            walker.result.named.setdefault(Global(module.decode(), name.decode()), False)
    walker.result.end = walker.position
    return walker.result


class _Walker:
    def __init__(self, data: bytes, start: int) -> None:
        self.data = data
        self.position = start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.result = Walk({})

    def run(self) -> None:
        for _ in range(MOST_OPERATIONS):
            if self.position >= len(self.data):
                raise ValueError("it ends before its STOP")
            code = self.data[self.position]
            self.position += 1
            if code == ord("."):
                return
            self.apply(code, self.argument(code))
        raise ValueError(f"it has more than {MOST_OPERATIONS} operations")

    def argument(self, code: int) -> bytes:
        if code in _FIXED:
            return self.take(_FIXED[code])
        if code in _COUNTED:
            layout = _COUNTED[code]
            return self.take(struct.unpack(layout, self.take(struct.calcsize(layout)))[0])
        if code in _LINES:
            return b"\n".join([self.line() for _ in range(_LINES[code])])
        return b""

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise ValueError("an argument goes past its end")
        at = self.position
        self.position += count
        return self.data[at : at + count]

    def line(self) -> bytes:
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise ValueError("a text argument is cut off")
        at, self.position = self.position, end + 1
        return self.data[at:end]

    def pop(self) -> Any:
        return self.stack.pop() if self.stack else None

    def pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self.stack:
            item = self.stack.pop()
            if item is _MARK:
                break
            items.append(item)
        return items[::-1]

    def name(self, target: Any, *, called: bool) -> None:
        if isinstance(target, Global):
            self.result.named[target] = self.result.named.get(target, False) or called

    def apply(self, code: int, argument: bytes) -> None:
        if code in _STRINGS:
            self.stack.append(argument.decode("utf-8", "replace").strip("'\""))
        elif code in _SPECIAL:
            _SPECIAL[code](self, argument)
        elif code in _TO_MARK:
            self.to_mark(code)
        elif code in _EFFECTS:
            taken, given = _EFFECTS[code]
            if taken:
                del self.stack[-taken:]
            if given:
                self.stack.append(None)
        elif code not in (0x80, 0x95):
            raise ValueError(f"opcode 0x{code:02x} is unknown")

    def to_mark(self, code: int) -> None:
        items = self.pop_to_mark()
        if code == ord("o") and items:
            self.name(items[0], called=True)
        if chr(code) in "tldo" or code == 0x91:
            self.stack.append(None)


def _push_global(walker: _Walker, module: Any, name: Any) -> None:
    is_named = isinstance(module, str) and isinstance(name, str)
    found = Global(module, name) if is_named else Global("?", "a name put together while reading")
    walker.name(found, called=False)
    walker.stack.append(found)


def _global(walker: _Walker, argument: bytes) -> None:
    module, _, name = argument.partition(b"\n")
    _push_global(walker, module.decode("utf-8", "replace"), name.decode("utf-8", "replace"))


def _instance(walker: _Walker, argument: bytes) -> None:
    walker.pop_to_mark()
    _global(walker, argument)
    walker.name(walker.stack[-1], called=True)


def _stack_global(walker: _Walker, argument: bytes) -> None:
    name, module = walker.pop(), walker.pop()
    _push_global(walker, module, name)


def _call(taken: int) -> Any:
    def effect(walker: _Walker, argument: bytes) -> None:
        for _ in range(taken):
            walker.pop()
        walker.name(walker.pop(), called=True)
        walker.stack.append(None)

    return effect


def _get(walker: _Walker, argument: bytes) -> None:
    walker.stack.append(walker.memo.get(_index(argument)))


def _put(walker: _Walker, argument: bytes) -> None:
    walker.memo[_index(argument)] = walker.stack[-1] if walker.stack else None


def _get_line(walker: _Walker, argument: bytes) -> None:
    walker.stack.append(walker.memo.get(int(argument)))


def _put_line(walker: _Walker, argument: bytes) -> None:
    walker.memo[int(argument)] = walker.stack[-1] if walker.stack else None


def _index(argument: bytes) -> int:
    return int.from_bytes(argument, "little")


def _memoize(walker: _Walker, argument: bytes) -> None:
    walker.memo[len(walker.memo)] = walker.stack[-1] if walker.stack else None


def _extension(walker: _Walker, argument: bytes) -> None:
    _push_global(walker, "copyreg", f"extension {_index(argument)}")
    walker.name(walker.stack[-1], called=True)


_SPECIAL: Mapping[int, Any] = MappingProxyType(
    {
        ord("("): lambda walker, _: walker.stack.append(_MARK),
        ord("2"): lambda walker, _: walker.stack.append(walker.stack[-1] if walker.stack else None),
        ord("c"): _global,
        ord("i"): _instance,
        0x93: _stack_global,
        ord("R"): _call(1),
        0x81: _call(1),
        0x92: _call(2),
        ord("g"): _get_line,
        ord("p"): _put_line,
        ord("h"): _get,
        ord("j"): _get,
        ord("q"): _put,
        ord("r"): _put,
        0x94: _memoize,
        0x82: _extension,
        0x83: _extension,
        0x84: _extension,
    }
)
