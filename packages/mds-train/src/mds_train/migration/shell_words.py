"""Words of a script with their variables put in. What only a running script knows stays marked."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mds_train.migration.shell_arithmetic import Unknown, arithmetic
from mds_train.migration.shell_syntax import (
    MARK,
    Part,
    ScriptError,
    Word,
    parse_parts,
    parse_script,
)

__all__ = ["Variables", "is_known", "mark", "split_known", "unknown_parts", "without_unknown"]

_OPEN, _CLOSE = MARK
_HIDDEN = "\N{SYMBOL FOR NULL}"
_MARK = re.compile(f"{_OPEN}(.*?){_CLOSE}", flags=re.DOTALL)
_NAMED = re.compile(r"(!?#?[A-Za-z_]\w*|[0-9@*#?!$-])(?:\[([^\]]*)\])?(.*)", flags=re.DOTALL)
_DEPTH = 40
_LONGEST = 1 << 20


def is_known(text: str) -> bool:
    """Whether nothing of it depends on a running script."""
    return _OPEN not in text


def unknown_parts(text: str) -> list[str]:
    """What a text depends on, as it stands in the script."""
    return _MARK.findall(text)


def without_unknown(text: str, *, replacement: str) -> str:
    """The text with something else in the place of what is not known."""
    return _MARK.sub(replacement, text)


def split_known(text: str, separator: str) -> list[str]:
    """The pieces between separators; those in what is not known do not count."""
    hidden = _MARK.sub(lambda found: found[0].replace(separator, _HIDDEN), text)
    return [piece.replace(_HIDDEN, separator) for piece in hidden.split(separator)]


def mark(text: str) -> str:
    """Mark something that only a running script knows."""
    return f"{_OPEN}{text.replace(_OPEN, '').replace(_CLOSE, '')}{_CLOSE}"


@dataclass(slots=True)
class Variables:
    """A script's variables at one moment.

    Attributes:
        texts: Plain variables.
        arrays: Array variables.
        folder: The folder of the script, which `pwd` and `dirname $0` are taken to be.
    """

    texts: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    folder: str = "."
    _depth: int = 0

    def fields(self, word: Word) -> list[str]:
        """The words that a word becomes: unquoted values split at blanks."""
        done: list[str] = []
        current: str | None = None
        for part in word:
            items = self._array_items(part)
            if items is not None:
                for index, item in enumerate(items):
                    if index:
                        done.append(current or "")
                        current = None
                    current = (current or "") + item
                continue
            text = self._value(part)
            if part.quoted or part.kind == "text":
                current = (current or "") + text
                continue
            pieces = _split(text)
            for index, piece in enumerate(pieces):
                if index:
                    if current is not None:
                        done.append(current)
                    current = None
                if piece:
                    current = (current or "") + piece
        if current is not None:
            done.append(current)
        return done

    def text(self, word: Word) -> str:
        """A word as one text, as on the right of an assignment."""
        values = (self._array_items(part) for part in word)
        parts = (
            " ".join(items) if items is not None else self._value(part)
            for part, items in zip(word, values, strict=True)
        )
        joined = "".join(parts)
        if len(joined) > _LONGEST:
            raise ScriptError("a value grows beyond a megabyte")
        return joined

    def number(self, text: str) -> int:
        """The value of an arithmetic expression."""
        expanded = self.text(parse_parts(text))
        if not is_known(expanded):
            raise Unknown(expanded)
        return arithmetic(expanded, value_of=lambda name: self.texts.get(name, ""))

    def behind(self, parts: Iterable[str]) -> list[str]:
        """The first variables that hold what only a running script knows, of these parts."""
        unknown = {name: unknown_parts(text) for name, text in self.texts.items()}
        names: list[str] = []
        pending, seen = list(parts), set()
        while pending:
            if (part := pending.pop(0)) in seen:
                continue
            seen.add(part)
            mentioned = set(re.findall(r"(?<![\w-])[A-Za-z_]\w*", part))
            inner = [own for name in mentioned for own in unknown.get(name, ())]
            pending += sorted(inner)
            if not inner:
                names += [name for name, own in unknown.items() if part in own][:1]
        return names

    def _array_items(self, part: Part) -> list[str] | None:
        """The items of ``${name[@]}``; unquoted ones split like any value."""
        if part.kind != "variable":
            return None
        name, bracket, rest = part.text.partition("[")
        if bracket and rest in ("@]", "*]") and name.isidentifier():
            items = self.arrays.get(name, [self.texts[name]] if name in self.texts else [])
            if part.quoted:
                return list(items) if rest == "@]" else [" ".join(items)]
            return [piece for item in items for piece in _split(item) if piece]
        if part.text in ("@", "*"):
            return list(self.arrays.get("@", []))
        return None

    def _value(self, part: Part) -> str:
        if part.kind == "text":
            return part.text
        self._depth += 1
        try:
            if self._depth > _DEPTH:
                raise ScriptError("variables refer to each other in a circle")
            return self._computed(part)
        finally:
            self._depth -= 1

    def _computed(self, part: Part) -> str:
        if part.kind == "arithmetic":
            try:
                return str(self.number(part.text))
            except Unknown:
                return mark(f"$(({part.text}))")
        if part.kind == "command":
            return self._command(part.text)
        return self._variable(part.text)

    def _variable(self, inside: str) -> str:
        found = _NAMED.fullmatch(inside)
        if found is None:
            return mark("${" + inside + "}")
        name, index, operation = found.groups()
        if name.startswith("#") and len(name) > 1:
            return self._length(name[1:], index)
        if name.startswith("!"):
            return mark("${" + inside + "}")
        value = self._plain(name, index)
        return value if not operation else self._operated(name, value, operation)

    def _plain(self, name: str, index: str | None) -> str:
        if index is not None or name in self.arrays:
            items = self.arrays.get(name, [])
            try:
                position = self.number(index) if index else 0
            except Unknown:
                return mark(f"${{{name}[{index}]}}")
            return items[position] if 0 <= position < len(items) else ""
        if name in ("0", "#"):
            known = {"0": f"{self.folder}/script.sh", "#": str(len(self.arrays.get("@", [])))}
            return known[name]
        if name.isdigit():
            arguments = self.arrays.get("@", [])
            return arguments[int(name) - 1] if int(name) <= len(arguments) else ""
        if name == "PWD":
            return self.folder
        if name not in self.texts and name.isupper() and name in _OF_MACHINES:
            return mark("$" + name)
        return self.texts.get(name, "")

    def _length(self, name: str, index: str | None) -> str:
        if index in ("@", "*"):
            return str(len(self.arrays.get(name, [])))
        return str(len(self._plain(name, index)))

    def _operated(self, name: str, value: str, operation: str) -> str:
        """``${NAME:-default}`` and its relatives."""
        for sign in (":-", ":=", "-", "=", ":+", "+"):
            if operation.startswith(sign):
                word = parse_parts(operation[len(sign) :])
                is_set = bool(value) if sign.startswith(":") else (value or name in self.texts)
                if sign.endswith("+"):
                    return self.text(word) if is_set else ""
                return value if is_set else self.text(word)
        if operation.startswith((":?", "?")):
            return value or mark("$" + name)
        if operation.startswith(("#", "%")):
            sign = operation[0] * (2 if operation[1:2] == operation[0] else 1)
            pattern = self.text(parse_parts(operation[len(sign) :]))
            return _without(value, pattern, sign=sign)
        if operation in (",,", "^^"):
            return value.lower() if operation == ",," else value.upper()
        if operation.startswith("/"):
            old, _, new = operation.lstrip("/").partition("/")
            return value.replace(old, new, -1 if operation.startswith("//") else 1)
        return mark("${" + name + operation + "}")

    def _command(self, text: str) -> str:
        """What a command would print, for the few whose answer is plain."""
        try:
            commands = parse_script(text)
        except ScriptError:
            return mark(f"$({text.strip()})")
        words = [self.fields(w)[0] for w in getattr(commands[0], "words", ()) if self.fields(w)]
        answer = None
        if len(commands) == 1 and words and is_known(" ".join(words)):
            known = _ANSWERS.get(words[0])
            answer = None if known is None else known(self, words[1:])
        elif "dirname" in text and "pwd" in text:
            answer = self.folder  # $(cd "$(dirname "$0")" && pwd)
        return mark(f"$({text.strip()})") if answer is None else answer


_OF_MACHINES = frozenset(
    ("HOSTNAME", "RANDOM", "HOME", "USER", "SLURM_JOB_ID", "RANK", "WORLD_SIZE")
)

_Answer = Callable[[Variables, list[str]], str | None]
_ANSWERS: Mapping[str, _Answer] = {
    "pwd": lambda variables, _: variables.folder,
    "echo": lambda _, words: " ".join(word for word in words if word not in ("-n", "-e")),
    "dirname": lambda _, words: posixpath.dirname(words[-1]) or "." if words else None,
    "basename": lambda _, words: posixpath.basename(words[0]) if len(words) == 1 else None,
    "realpath": lambda _, words: posixpath.normpath(words[-1]) if words else None,
    "readlink": lambda _, words: posixpath.normpath(words[-1]) if words else None,
}


def _split(text: str) -> list[str]:
    """Pieces between blanks; an empty first or last one where a blank stands at that end."""
    pieces: list[str] = [""]
    depth = 0
    for character in text:
        depth += (character == _OPEN) - (character == _CLOSE)
        if character.isspace() and not depth:
            if pieces[-1] or len(pieces) == 1:
                pieces.append("")
        else:
            pieces[-1] += character
    return pieces


def _without(value: str, pattern: str, *, sign: str) -> str:
    """Without the shortest or longest beginning (#) or end (%) that fits a pattern."""
    lengths = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for length in lengths:
        cut = value[:length] if sign[0] == "#" else value[len(value) - length :]
        if fnmatch.fnmatchcase(cut, pattern):
            return value[length:] if sign[0] == "#" else value[: len(value) - length]
    return value
