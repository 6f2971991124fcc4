"""The stack machine that reads a pickle's opcodes as data. It imports nothing and calls nothing."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mds_ckpt.pickles.build import TORCH_DTYPES, construct
from mds_ckpt.pickles.globals import judge
from mds_ckpt.pickles.records import EnumRecord, Global, Opaque, StorageRef, TorchDtype

__all__ = ["Machine", "PickleError", "PickleLimits"]


class PickleError(ValueError):
    """A pickle that is broken, hostile, or beyond the limits. Says where and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PickleLimits:
    """How large a pickle may be before it is refused."""

    size: int = 64 << 20
    """Bytes of the pickle."""
    operations: int = 1_000_000
    depth: int = 100
    """Levels of containers inside containers."""
    string: int = 16 << 20
    """Bytes of one string or bytes object."""
    nodes: int = 4_000_000
    """Values in the tree when shared ones are counted each time they occur."""
    integer: int = 128
    """Bytes of one integer."""
    line: int = 1024
    """Characters of a text argument, such as a module name."""
    tuple_keys: int = 10_000
    """Dictionary keys that are tuples."""


_DTYPE_NAMES = frozenset(TORCH_DTYPES) | {"complex128", "quint8", "qint8", "qint32"}
_KEYS = (str, bytes, bool, float, Global, TorchDtype, EnumRecord)


def _is_simple_key(value: object) -> bool:
    """Keys whose hash and comparison take constant time, whatever the pickle says."""
    if value is None or isinstance(value, _KEYS):
        return True
    return isinstance(value, int) and value.bit_length() <= 64


def _past_end(count: int) -> PickleError:
    return PickleError(f"an argument of {count} bytes goes past the end of the pickle")


class Machine:
    """Input, stack, marks and memo of one reading; ``position`` is the next byte to read."""

    __slots__ = (
        "data",
        "limits",
        "marks",
        "memo",
        "position",
        "push",
        "stack",
        "storages",
        "tuple_keys",
        "work",
    )

    def __init__(self, data: bytes, start: int, limits: PickleLimits) -> None:
        self.data = data
        self.position = start
        self.limits = limits
        self.stack: list[Any] = []
        self.push = self.stack.append
        """Put a value on the stack. Half of all operations end so, hence no method of our own."""
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageRef] = {}
        self.tuple_keys = 0
        self.work = 0

    # Reading arguments

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        at = self.position
        if count < 0 or count > len(self.data) - at:
            raise _past_end(count)
        self.position = at + count
        return self.data[at : at + count]

    def byte(self) -> int:
        """The next byte as a number. Most arguments are one, so it is not unpacked."""
        at = self.position
        if at >= len(self.data):
            raise _past_end(1)
        self.position = at + 1
        return self.data[at]

    def number(self, layout: struct.Struct) -> int:
        """The next fixed-width integer."""
        at, count = self.position, layout.size
        if count > len(self.data) - at:
            raise _past_end(count)
        self.position = at + count
        value: int = layout.unpack_from(self.data, at)[0]
        return value

    def line(self) -> str:
        """A text argument, up to the line break."""
        at, limit = self.position, self.limits.line
        end = self.data.find(b"\n", at, at + limit)
        if end < 0:
            raise PickleError(f"a text argument is cut off or longer than {limit} characters")
        self.position = end + 1
        try:
            return self.data[at:end].decode("utf-8")
        except UnicodeDecodeError:
            raise PickleError("a text argument is not UTF-8") from None

    def text(self, count: int) -> str:
        """A string of ``count`` UTF-8 bytes."""
        raw = self.blob(count)
        try:
            return raw.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise PickleError("a string is not UTF-8") from None

    def blob(self, count: int) -> bytes:
        """A bytes object of ``count`` bytes."""
        if count > self.limits.string:
            raise PickleError(f"a string of {count} bytes is over the limit, {self.limits.string}")
        return self.take(count)

    # The stack

    def pop(self) -> Any:
        """Take the top value, but none from below the last MARK."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor:
            raise PickleError("a value is taken from an empty stack")
        return self.stack.pop()

    def peek(self) -> Any:
        """The top value, but none from below the last MARK."""
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor:
            raise PickleError("a value is read from an empty stack")
        return self.stack[-1]

    def pop_mark(self) -> list[Any]:
        """Take all values above the last MARK, and the MARK."""
        if not self.marks:
            raise PickleError("a MARK is missing")
        at = self.marks.pop()
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def drop_mark(self) -> None:
        """Forget all values above the last MARK."""
        self.pop_mark()

    def charge(self, amount: int) -> None:
        """Count what one operation copies, so that a short pickle can't ask for long work."""
        self.work += amount
        if self.work > 4 * self.limits.size:
            raise PickleError("it asks for more copying than its size explains")

    # Building

    def key(self, value: Any) -> Hashable:
        """``value``, if it may be a dictionary key; hashing any other could take for ever."""
        if _is_simple_key(value):
            return value  # type: ignore[no-any-return]
        if isinstance(value, tuple) and len(value) <= 16 and all(map(_is_simple_key, value)):
            self.tuple_keys += 1
            if self.tuple_keys <= self.limits.tuple_keys:
                return value
            raise PickleError(f"more than {self.limits.tuple_keys} dictionary keys are tuples")
        raise PickleError(f"a {type(value).__name__} is used as a dictionary key or set member")

    def set_items(self, target: Any, items: list[Any]) -> None:
        """Put keys and values, alternating, into a dictionary."""
        if len(items) % 2:
            raise PickleError("a dictionary gets a key without a value")
        if isinstance(target, dict):
            for i in range(0, len(items), 2):
                target[self.key(items[i])] = items[i + 1]
        elif isinstance(target, Opaque):
            target.items.extend(zip(items[::2], items[1::2], strict=True))
        else:
            raise PickleError(f"items are set on a {type(target).__name__}, which is no dictionary")

    def extend(self, target: Any, items: list[Any]) -> None:
        """Add to a list."""
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Opaque):
            target.items.extend(items)
        else:
            raise PickleError(f"items are added to a {type(target).__name__}, which is no list")

    def add_members(self, target: Any, items: list[Any]) -> None:
        """Add to a set."""
        if not isinstance(target, set):
            raise PickleError(f"members are added to a {type(target).__name__}, which is no set")
        target.update(map(self.key, items))

    def find_global(self, module: str, name: str) -> Any:
        """The record for a global name, unless the name is dangerous."""
        if judge(module, name) == "dangerous":
            raise PickleError(f"it would import {module}.{name}, which can run code")
        if module == "torch" and name in _DTYPE_NAMES:
            return TorchDtype(name)
        return Global(module, name)

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The record or value that a call stands for."""
        if not isinstance(target, Global):
            raise PickleError(f"it calls a {type(target).__name__} that is not a plain global name")
        if not isinstance(args, tuple):
            raise PickleError(f"{target} is called with a {type(args).__name__}, not arguments")
        if judge(target.module, target.name) == "function":
            raise PickleError(f"it would call the function {target}, which is not a known one")
        return construct(self, target, args, kwargs)
