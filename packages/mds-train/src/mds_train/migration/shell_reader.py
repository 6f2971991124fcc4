"""Follows a launch script from top to bottom, without running anything, to its training command.

Assignments, conditions on known values, here-documents, `sed` on templates and files that it
sources are followed; every other command is passed over. Where a condition depends on a machine,
its body is left out and a remark says so; of a loop the first round is taken.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mds_train.migration.shell_arithmetic import Unknown
from mds_train.migration.shell_syntax import (
    Block,
    Case,
    Command,
    Function,
    If,
    Loop,
    ScriptError,
    Simple,
    Word,
    parse_script,
)
from mds_train.migration.shell_words import Variables, is_known, split_known

__all__ = ["Launch", "Reading", "read_script"]

_DECLARATIONS = ("export", "declare", "local", "readonly", "typeset")
_DEPTH = 20
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
_TRAINING_FLAGS = ("--num-layers", "--encoder-num-layers", "--micro-batch-size", "--hidden-size")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One command that trains."""

    line: int
    words: tuple[str, ...]

    @property
    def script(self) -> str:
        """The Python file that is started; empty where there is none."""
        return next((word for word in self.words if word.endswith(".py")), "")

    @property
    def arguments(self) -> list[str]:
        """What the Python file gets."""
        names = [index for index, word in enumerate(self.words) if word.endswith(".py")]
        return list(self.words[names[0] + 1 :] if names else self.words)

    @property
    def launcher(self) -> list[str]:
        """What stands before the Python file."""
        names = [index for index, word in enumerate(self.words) if word.endswith(".py")]
        return list(self.words[: names[0]] if names else ())


@dataclass(kw_only=True, slots=True)
class Reading:
    """What was found in a script."""

    launches: list[Launch] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Contents of the files that it would write, by name."""
    remarks: list[str] = field(default_factory=list)
    placeholders: list[str] = field(default_factory=list)
    """Variables that the script wants its user to write."""
    variables: Variables = field(default_factory=Variables)
    """As they are at its end."""


_LARGEST_SCRIPT = 2**20


def read_script(
    path: Path, *, arguments: Iterable[str] = (), given: Mapping[str, str] | None = None
) -> Reading:
    """Read a script.

    Args:
        path: The script; files that it names are looked for beside it.
        arguments: Its positional arguments.
        given: Variables that the user sets; what the script assigns to them does not count.

    Raises:
        ScriptError: If the script is not understood; the message names the line.
    """
    text = _text_of_script(path)
    variables = Variables(texts=dict(given or {}), folder=str(path.parent))
    variables.arrays["@"] = list(arguments)
    follower = _Follower(variables, path.parent)
    try:
        follower.block(parse_script(text))
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}; write the arguments as a list instead") from error
    except RecursionError as error:
        raise ScriptError(f"{path}: its brackets are nested too deeply") from error
    if not follower.reading.launches:
        follower.look_at_variables()
    return follower.reading


def _text_of_script(path: Path) -> str:
    """What a person wrote; a checkpoint that was named by mistake would be searched for hours."""
    if path.stat().st_size > _LARGEST_SCRIPT:
        raise ScriptError(f"{path}: it has more than {_LARGEST_SCRIPT} bytes, as no script has")
    data = path.read_bytes()
    if b"\0" in data:
        raise ScriptError(f"{path}: it is no text; name the launch script")
    return data.decode("utf-8", errors="replace")


class _Follower:
    def __init__(self, variables: Variables, folder: Path) -> None:
        self._variables = variables
        self._folder = folder
        self._given = frozenset(variables.texts)
        self._functions: dict[str, Block] = {}
        self._depth = 0
        self._piped = ""
        self.reading = Reading(variables=variables)

    def block(self, commands: Block) -> None:
        self._depth += 1
        if self._depth > _DEPTH:
            raise ScriptError("functions or evaluations are nested too deeply")
        needed: bool | None = None
        for command in commands:
            verdict: bool | None = needed
            if needed is not False:
                self._command(command)
                verdict = self._holds((command,)) if _connective(command) else None
            needed = _needed_next(_connective(command), verdict=verdict)
        self._depth -= 1

    def look_at_variables(self) -> None:
        """Where another script starts the training, a variable holds its arguments."""
        longest = max(
            self._variables.texts.items(), key=lambda item: item[1].count(" --"), default=("", "")
        )
        words = tuple(longest[1].split())
        if set(words) & set(_TRAINING_FLAGS):
            self.reading.launches.append(Launch(line=0, words=words))
            self.reading.remarks.append(
                f"No training command; took the arguments in ${longest[0]}."
            )

    def _command(self, command: Command) -> None:
        match command:
            case Simple():
                self._simple(command)
            case If():
                self._if(command)
            case Loop():
                self._loop(command)
            case Case():
                self._case(command)
            case Function(name=name, body=body):
                self._functions[name] = body

    # Conditions -----------------------------------------------------------------------------------

    def _if(self, command: If) -> None:
        for condition, body in command.branches:
            verdict = self._holds(condition)
            if verdict is None:
                self._remark_undecided(command.line, body)
            elif verdict:
                self.block(body)
                return
        self.block(command.otherwise)

    def _remark_undecided(self, line: int, body: Block) -> None:
        if _sets_something(body):
            self.reading.remarks.append(
                f"Line {line}: the condition depends on the machine; its body was left out."
            )

    def _loop(self, command: Loop) -> None:
        if command.kind == "while":
            if self._holds(command.condition):
                self.block(command.body)
            return
        items = [item for word in command.words for item in self._variables.fields(word)]
        if command.variable and items:
            self._variables.texts[command.variable] = items[0]
        elif command.words and (
            found := re.match(r"\s*(\w+)\s*=\s*(\d+)", items[0] if items else "")
        ):
            self._variables.texts[found[1]] = found[2]
        if len(items) != 1 and _sets_something(command.body):
            self.reading.remarks.append(
                f"Line {command.line}: of the loop, the first round was taken."
            )
        self.block(command.body)

    def _case(self, command: Case) -> None:
        subject = self._variables.text(command.subject)
        for patterns, body in command.branches:
            texts = [self._variables.text(pattern) for pattern in patterns]
            if any(fnmatch.fnmatchcase(subject, text) for text in texts):
                self.block(body)
                return

    def _holds(self, condition: Block) -> bool | None:
        """Whether a condition is true; None where only a machine knows."""
        if len(condition) > 1:
            first, rest = condition[0], condition[1:]
            if (connective := _connective(first)) in ("&&", "||"):
                verdicts = (self._holds((first,)), self._holds(rest))
                return _connected(verdicts, either=connective == "||")
            return self._holds(rest)  # `A=1; [ ... ]`: the last one counts
        if not condition or not isinstance(condition[0], Simple):
            return None
        words = condition[0].words
        if len(words) == 1 and words[0] and words[0][0].kind == "arithmetic":
            try:
                return bool(self._variables.number(words[0][0].text))
            except Unknown:
                return None
        texts = [self._variables.text(word) for word in words]
        if texts[:1] == ["["] and texts[-1:] == ["]"]:
            return _test([t for w in words[1:-1] for t in self._tested(w)])
        if texts[:1] == ["[["] and texts[-1:] == ["]]"]:
            return _test(texts[1:-1])
        if texts[:1] == ["test"]:
            return _test(texts[1:])
        return {"true": True, "false": False}.get(texts[0] if len(texts) == 1 else "")

    def _tested(self, word: Word) -> list[str]:
        return self._variables.fields(word)

    # Commands -------------------------------------------------------------------------------------

    def _simple(self, command: Simple) -> None:
        if any(redirect.kind == "<" for redirect in command.redirects) and command.words:
            self._note_placeholder(command.words[0])
        for name, appends, words in command.arrays:
            items = [item for word in words for item in self._variables.fields(word)]
            earlier = self._variables.arrays.get(name, []) if appends else []
            self._variables.arrays[name] = [*earlier, *items]
        words = self._without_assignments(command.words)
        if not words:
            return
        fields = [item for word in words for item in self._variables.fields(word)]
        if not fields:
            return
        output = self._output(command, fields)
        targets = [
            self._variables.text(r.target) for r in command.redirects if r.kind in (">", ">>")
        ]
        for target in targets:
            if output is not None:
                self.reading.files[target] = output
        self._piped = output or "" if command.piped else ""

    def _without_assignments(self, words: tuple[Word, ...]) -> tuple[Word, ...]:
        """Do the assignments in front; ``export`` and its like are nothing but assignments."""
        rest = list(words)
        declared = bool(rest) and self._variables.text(rest[0]) in _DECLARATIONS
        if declared:
            rest.pop(0)
        while rest and (declared or _is_assignment(rest[0])):
            self._assign(rest.pop(0))
        return tuple(rest)

    def _assign(self, word: Word) -> None:
        if not _is_assignment(word):
            return
        found = _ASSIGNMENT.match(word[0].text)
        assert found is not None
        first = type(word[0])("text", word[0].text[found.end() :], word[0].quoted)
        value = self._variables.text((first, *word[1:]))
        name, _, appends = found.groups()
        if name in self._given:
            return
        if appends and name in self._variables.texts:
            value = self._variables.texts[name] + value
        self._variables.arrays.pop(name, None)
        self._variables.texts[name] = value

    def _note_placeholder(self, word: Word) -> None:
        """`NAME=<Specify path>`, which a shell takes for a file to read from."""
        if _is_assignment(word) and len(word) == 1 and word[0].text.endswith("="):
            name = word[0].text[:-1]
            self.reading.placeholders += [] if name in self._given else [name]

    def _output(self, command: Simple, fields: list[str]) -> str | None:
        """Follow a command; its output where that is known and wanted."""
        name, arguments = fields[0], fields[1:]
        here = [self._variables.text(r.target) for r in command.redirects if r.kind == "<<"]
        match name:
            case "eval":
                self.block(parse_script(" ".join(arguments)))
            case "source" | ".":
                self._source(arguments)
            case "cat":
                return here[0] if here else self._contents(arguments)
            case "echo":
                return " ".join(word for word in arguments if word not in ("-e", "-n")) + "\n"
            case "sed":
                return self._sed(arguments)
            case "unset":
                for variable in arguments:
                    self._variables.texts.pop(variable, None)
            case _ if name in self._functions:
                self._call(name, arguments)
            case _:
                self._look_for_launch(command.line, fields)
        return None

    def _call(self, name: str, arguments: list[str]) -> None:
        outer = self._variables.arrays.get("@", [])
        self._variables.arrays["@"] = arguments
        self.block(self._functions[name])
        self._variables.arrays["@"] = outer

    def _look_for_launch(self, line: int, fields: list[str]) -> None:
        flags = {word.partition("=")[0].replace("_", "-") for word in fields}
        if flags & set(_TRAINING_FLAGS):
            self.reading.launches.append(Launch(line=line, words=tuple(fields)))
            return
        inner = [word for word in fields if any(flag in word for flag in _TRAINING_FLAGS)]
        if inner:  # `srun bash -c "..."`
            self.block(parse_script(inner[0]))

    def _source(self, arguments: list[str]) -> None:
        path = self._path(arguments[0]) if arguments else None
        if path is None or not path.is_file():
            self.reading.remarks.append(
                f"{arguments[0] if arguments else '.'}: not there, not read."
            )
            return
        self.block(parse_script(_text_of_script(path)))

    def _path(self, name: str) -> Path | None:
        if not is_known(name):
            return None
        path = Path(name)
        return path if path.is_absolute() or path.exists() else self._folder / path

    def _contents(self, names: list[str]) -> str | None:
        if not names:
            return self._piped or None
        name = names[-1]
        if name in self.reading.files:
            return self.reading.files[name]
        path = self._path(name)
        if path is None or not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace")

    def _sed(self, arguments: list[str]) -> str | None:
        """``s/old/new/`` on a file or on what comes from the command before."""
        scripts = [word for word in arguments if re.match(r"s(\W)", word)]
        names = [word for word in arguments if word not in scripts and not word.startswith("-")]
        content = self._contents(names) if names else (self._piped or None)
        if content is None:
            return None
        for script in scripts:
            content = _substituted(content, script)
        return content


def _connective(command: Command) -> str:
    return command.connective if isinstance(command, Simple) else ""


def _needed_next(connective: str, *, verdict: bool | None) -> bool | None:
    """Whether the next command is done; where only a machine knows, a test's is not."""
    if not connective:
        return None
    if verdict is None:
        return None  # `cd x && python ...`: commands mostly succeed
    return verdict if connective == "&&" else not verdict


def _substituted(content: str, script: str) -> str:
    parts = split_known(script[2:], script[1])
    if len(parts) < 2:
        return content
    return content.replace(parts[0], parts[1])


def _is_assignment(word: Word) -> bool:
    return bool(
        word and word[0].kind == "text" and not word[0].quoted and _ASSIGNMENT.match(word[0].text)
    )


def _sets_something(commands: Block) -> bool:
    """Whether leaving these commands out can change what is trained."""
    for command in commands:
        if isinstance(command, Simple):
            text = "".join(part.text for word in command.words for part in word)
            if command.arrays or any(_is_assignment(word) for word in command.words[:1]):
                return True
            if any(flag in text for flag in _TRAINING_FLAGS):
                return True
        elif isinstance(command, If):
            if any(_sets_something(body) for _, body in command.branches):
                return True
        elif isinstance(command, Loop) and _sets_something(command.body):
            return True
    return False


def _test(words: list[str]) -> bool | None:
    """The verdict of ``[ ... ]``."""
    for connective in ("||", "-o", "&&", "-a"):
        if connective in words:
            at = words.index(connective)
            verdicts = (_test(words[:at]), _test(words[at + 1 :]))
            return _connected(verdicts, either=connective in ("||", "-o"))
    if words[:1] == ["!"]:
        verdict = _test(words[1:])
        return None if verdict is None else not verdict
    if not all(is_known(word) for word in words):
        return None
    if len(words) == 2:
        return {"-z": not words[1], "-n": bool(words[1])}.get(words[0])
    if len(words) == 3:
        return _compare(*words)
    return bool(words and words[0]) if len(words) <= 1 else None


def _connected(verdicts: tuple[bool | None, ...], *, either: bool) -> bool | None:
    if either in verdicts:
        return either
    return None if None in verdicts else not either


def _compare(left: str, sign: str, right: str) -> bool | None:
    if sign in ("=", "=="):
        return fnmatch.fnmatchcase(left, right)
    if sign == "!=":
        return not fnmatch.fnmatchcase(left, right)
    try:
        a, b = int(left), int(right)
    except ValueError:
        return None
    signs = {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}
    return signs.get(sign)
