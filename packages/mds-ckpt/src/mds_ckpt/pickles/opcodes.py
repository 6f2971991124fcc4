"""What each opcode of a pickle does to the machine. Opcodes that are not here are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mds_ckpt.pickles.build import BuildError, apply_state, storage_reference
from mds_ckpt.pickles.machine import Machine, PickleError

__all__ = ["run"]

_Operation = Callable[[Machine], None]

_U2, _U4, _U8 = (struct.Struct(code) for code in ("<H", "<I", "<Q"))
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")


def _proto(m: Machine) -> None:
    version = m.byte()
    if version > 5:
        raise PickleError(f"pickle protocol {version} is unknown")


def _frame(m: Machine) -> None:
    # Some readers ignore frames, so a false one could show two readers two contents.
    if m.number(_U8) > len(m.data) - m.position:
        raise PickleError("a frame goes past the end of the pickle")


def _mark(m: Machine) -> None:
    if len(m.marks) >= m.limits.depth:
        raise PickleError(f"containers are nested more than {m.limits.depth} deep")
    m.marks.append(len(m.stack))


def _long(m: Machine, count: int) -> None:
    if not 0 <= count <= m.limits.integer:
        raise PickleError(f"an integer of {count} bytes is over the limit of {m.limits.integer}")
    m.push(int.from_bytes(m.take(count), "little", signed=True))


def _text_number(m: Machine) -> None:
    text = m.line()
    if text in ("00", "01"):
        m.push(text == "01")
        return
    digits = text.removesuffix("L")
    if len(digits) > 2 * m.limits.integer or not digits.lstrip("+-").isdecimal():
        raise PickleError("an integer in text form is not a number")
    m.push(int(digits))


def _text_float(m: Machine) -> None:
    try:
        m.push(float(m.line()))
    except ValueError:
        raise PickleError("a float in text form is not a number") from None


def _text_string(m: Machine) -> None:
    text = m.line()
    if len(text) < 2 or text[0] != text[-1] or text[0] not in "'\"" or "\\" in text:
        raise PickleError("a quoted string is not plain")
    m.push(text[1:-1])


def _unicode(m: Machine) -> None:
    text = m.line()
    if "\\" in text:
        raise PickleError("a text string has escapes")
    m.push(text)


def _byte_string(m: Machine, count: int) -> None:
    # Python 2 wrote names as byte strings.
    raw = m.blob(count)
    m.push(raw.decode("ascii") if raw.isascii() else raw)


def _get(m: Machine, index: int) -> None:
    try:
        m.push(m.memo[index])
    except KeyError:
        raise PickleError(f"memo entry {index} is read before it is written") from None


def _put(m: Machine, index: int) -> None:
    m.memo[index] = m.peek()


def _memo_index(m: Machine) -> int:
    text = m.line()
    if not text.isdecimal() or len(text) > 10:
        raise PickleError("a memo index is not a number")
    return int(text)


def _pop(m: Machine) -> None:
    if m.marks and m.marks[-1] == len(m.stack):
        m.marks.pop()
    else:
        m.pop()


def _tuple(count: int) -> _Operation:
    def operation(m: Machine) -> None:
        items = [m.pop() for _ in range(count)]
        m.push(tuple(reversed(items)))

    return operation


def _dict(m: Machine) -> None:
    items, target = m.pop_mark(), dict[Any, Any]()
    m.set_items(target, items)
    m.push(target)


def _frozenset(m: Machine) -> None:
    m.push(frozenset(map(m.key, m.pop_mark())))


def _append(m: Machine) -> None:
    value = m.pop()
    m.extend(m.peek(), [value])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    m.extend(m.peek(), items)


def _set_item(m: Machine) -> None:
    value, key = m.pop(), m.pop()
    m.set_items(m.peek(), [key, value])


def _set_items(m: Machine) -> None:
    items = m.pop_mark()
    m.set_items(m.peek(), items)


def _add_items(m: Machine) -> None:
    items = m.pop_mark()
    m.add_members(m.peek(), items)


def _global(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.push(m.find_global(module, name))


def _stack_global(m: Machine) -> None:
    name, module = m.pop(), m.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleError("a global is named by something that is not a string")
    m.push(m.find_global(module, name))


def _reduce(m: Machine) -> None:
    args, target = m.pop(), m.pop()
    m.push(m.call(target, args))


def _new_object_ex(m: Machine) -> None:
    kwargs, args, target = m.pop(), m.pop(), m.pop()
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise PickleError("keyword arguments are not a dictionary with names")
    m.push(m.call(target, args, kwargs))


def _instance(m: Machine) -> None:
    module, name = m.line(), m.line()
    m.push(m.call(m.find_global(module, name), tuple(m.pop_mark())))


def _object(m: Machine) -> None:
    items = m.pop_mark()
    if not items:
        raise PickleError("an object without a class")
    m.push(m.call(items[0], tuple(items[1:])))


def _build(m: Machine) -> None:
    state = m.pop()
    apply_state(m, m.peek(), state)


def _persistent(m: Machine) -> None:
    storage = storage_reference(m.pop())
    known = m.storages.setdefault(storage.key, storage)
    if known != storage:
        raise PickleError(f"storage '{storage.key}' is described in two ways")
    m.push(storage)


_OPERATIONS: Mapping[int, _Operation] = MappingProxyType(
    {
        0x80: _proto,
        0x95: _frame,
        ord("("): _mark,
        ord("0"): _pop,
        ord("1"): lambda m: m.drop_mark(),
        ord("2"): lambda m: m.push(m.peek()),
        ord("N"): lambda m: m.push(None),
        0x88: lambda m: m.stack.append(True),
        0x89: lambda m: m.stack.append(False),
        ord("I"): _text_number,
        ord("L"): _text_number,
        ord("F"): _text_float,
        ord("J"): lambda m: m.push(m.number(_I4)),
        ord("K"): lambda m: m.push(m.byte()),
        ord("M"): lambda m: m.push(m.number(_U2)),
        0x8A: lambda m: _long(m, m.byte()),
        0x8B: lambda m: _long(m, m.number(_I4)),
        ord("G"): lambda m: m.push(_F8.unpack(m.take(8))[0]),
        ord("S"): _text_string,
        ord("T"): lambda m: _byte_string(m, m.number(_U4)),
        ord("U"): lambda m: _byte_string(m, m.byte()),
        ord("V"): _unicode,
        ord("X"): lambda m: m.push(m.text(m.number(_U4))),
        0x8C: lambda m: m.push(m.text(m.byte())),
        0x8D: lambda m: m.push(m.text(m.number(_U8))),
        ord("B"): lambda m: m.push(m.blob(m.number(_U4))),
        ord("C"): lambda m: m.push(m.blob(m.byte())),
        0x8E: lambda m: m.push(m.blob(m.number(_U8))),
        0x96: lambda m: m.push(m.blob(m.number(_U8))),
        ord("]"): lambda m: m.push([]),
        ord("l"): lambda m: m.push(m.pop_mark()),
        ord("a"): _append,
        ord("e"): _appends,
        ord("}"): lambda m: m.push({}),
        ord("d"): _dict,
        ord("s"): _set_item,
        ord("u"): _set_items,
        ord(")"): lambda m: m.push(()),
        ord("t"): lambda m: m.push(tuple(m.pop_mark())),
        0x85: _tuple(1),
        0x86: _tuple(2),
        0x87: _tuple(3),
        0x8F: lambda m: m.push(set()),
        0x90: _add_items,
        0x91: _frozenset,
        ord("g"): lambda m: _get(m, _memo_index(m)),
        ord("h"): lambda m: _get(m, m.byte()),
        ord("j"): lambda m: _get(m, m.number(_U4)),
        ord("p"): lambda m: _put(m, _memo_index(m)),
        ord("q"): lambda m: _put(m, m.byte()),
        ord("r"): lambda m: _put(m, m.number(_U4)),
        0x94: lambda m: _put(m, len(m.memo)),
        ord("c"): _global,
        0x93: _stack_global,
        ord("R"): _reduce,
        0x81: _reduce,
        0x92: _new_object_ex,
        ord("i"): _instance,
        ord("o"): _object,
        ord("b"): _build,
        ord("Q"): _persistent,
    }
)


def run(machine: Machine) -> Any:
    """Read one pickle to its STOP and return its value."""
    data, end = machine.data, len(machine.data)
    at, find = machine.position, _OPERATIONS.get
    try:
        for _ in range(machine.limits.operations):
            at = machine.position
            if at >= end:
                raise PickleError("the pickle ends before its STOP")
            machine.position = at + 1
            if data[at] == _STOP:
                return _finish(machine)
            operation = find(data[at])
            if operation is None:
                raise PickleError(f"opcode 0x{data[at]:02x} is not one that a checkpoint uses")
            operation(machine)
    except (BuildError, PickleError) as error:
        raise PickleError(f"at byte {at} of the pickle: {error}") from None
    raise PickleError(f"it has more than {machine.limits.operations} operations")


def _finish(machine: Machine) -> Any:
    if len(machine.stack) != 1 or machine.marks:
        raise PickleError(f"{len(machine.stack)} values are left on the stack instead of one")
    return machine.stack[0]
