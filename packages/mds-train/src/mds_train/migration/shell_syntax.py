"""The part of bash's grammar that launch scripts use: text to commands. Nothing is executed.

Words keep their structure (literal text, variables, substitutions, and what was quoted), because
how a word splits is known only when its variables are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = [
    "MARK",
    "Block",
    "Case",
    "Command",
    "Function",
    "If",
    "Loop",
    "Part",
    "Redirect",
    "ScriptError",
    "Simple",
    "Word",
    "parse_parts",
    "parse_script",
]


MARK = ("\ue000", "\ue001")
"""Private characters around what only a running script knows."""


class ScriptError(ValueError):
    """The script uses a form that is not understood here."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word.

    Attributes:
        kind: "text", "variable" (the inside of ``${...}``), "command" or "arithmetic".
        text: The text itself, or what stands inside the brackets.
        quoted: Inside double or single quotes, so it does not split.
    """

    kind: str
    text: str
    quoted: bool


Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Redirect:
    """``> file`` (kind ">" or ">>"), or the lines of a here-document (kind "<<")."""

    kind: str
    target: Word


@dataclass(frozen=True, slots=True)
class Simple:
    """One command with its words; assignments in front are words like ``NAME=value``.

    ``arrays`` are assignments of the form ``NAME=( ... )``: name, whether it appends, words.
    """

    line: int
    words: tuple[Word, ...]
    redirects: tuple[Redirect, ...] = ()
    arrays: tuple[tuple[str, bool, tuple[Word, ...]], ...] = ()
    piped: bool = False
    """Its output goes into the next command."""
    connective: str = ""
    """ "&&" or "||", where the next command depends on how this one ends."""


@dataclass(frozen=True, slots=True)
class If:
    """Conditions with their bodies, and what else is to be done."""

    line: int
    branches: tuple[tuple[Block, Block], ...]
    otherwise: Block


@dataclass(frozen=True, slots=True)
class Loop:
    """``for`` (variable and words, or the text of a C-like head) or ``while``/``until``."""

    line: int
    kind: str
    variable: str
    words: tuple[Word, ...]
    condition: Block
    body: Block


@dataclass(frozen=True, slots=True)
class Case:
    """A subject and the patterns with their bodies."""

    line: int
    subject: Word
    branches: tuple[tuple[tuple[Word, ...], Block], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A definition."""

    name: str
    body: Block


Command = Simple | If | Loop | Case | Function
Block = tuple[Command, ...]

_OPERATORS = ("&>>", "<<<", "<<-", "&&", "||", ";;", ">>", "<<", "&>", ">&", "<&", ">|", *"|&;()<>")
_OPERATOR = re.compile("|".join(map(re.escape, _OPERATORS)))
_PLAIN = re.compile(rf"""[^ \t\r\n'"\\$`|&;()<>{MARK[0]}]+""")
"""Characters that mean themselves, quoted or not."""
_ENDS = frozenset(("then", "do", "done", "fi", "elif", "else", "esac", "}"))
_REDIRECTS = frozenset(("&>>", "&>", ">>", ">", ">&", "<", "<&", ">|", "<<<"))


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """ "word", "operator", "newline", "here" (a here-document's lines) or "array"."""
    line: int
    text: str = ""
    word: Word = ()
    items: tuple[Word, ...] = ()


def parse_script(text: str) -> Block:
    """Read a whole script.

    Raises:
        ScriptError: Naming the line that is not understood.
    """
    parser = _Parser(list(_Lexer(text).tokens()))
    block = parser.block(until=frozenset())
    parser.expect_end()
    return block


def parse_parts(text: str) -> Word:
    """Read a here-document's lines as the shell does: variables are known, quotes are plain."""
    return _Lexer(text).quoted_parts(end="")


@dataclass(slots=True)
class _Lexer:
    text: str
    at: int = 0
    line: int = 1
    _waiting: list[tuple[str, bool, bool]] = field(default_factory=list)
    """Here-documents whose lines come after this line: end word, quoted, tabs removed."""

    def tokens(self) -> Iterator[_Token]:
        while self.at < len(self.text):
            character = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self._forward(2)
            elif character == "\n":
                yield _Token("newline", self.line)
                self._forward(1)
                yield from self._here_documents()
            elif character in " \t\r":
                self._forward(1)
            elif character == "#":
                self._comment()
            elif operator := self._operator():
                yield from self._after_operator(operator)
            else:
                yield self._word()

    def _forward(self, count: int) -> str:
        taken = self.text[self.at : self.at + count]
        self.line += taken.count("\n")
        self.at += count
        return taken

    def _comment(self) -> None:
        end = self.text.find("\n", self.at)
        self._forward((len(self.text) if end < 0 else end) - self.at)

    def _operator(self) -> str:
        found = _OPERATOR.match(self.text, self.at)
        return found.group() if found else ""

    def _plain(self) -> str:
        """What means itself from here on, one character at the least."""
        found = _PLAIN.match(self.text, self.at)
        return self._forward(found.end() - self.at if found else 1)

    def _after_operator(self, operator: str) -> Iterator[_Token]:
        line = self.line
        if operator == "(" and self.text.startswith("((", self.at):
            inner = self._bracketed("((", "))")
            yield _Token("word", line, "((", (Part("arithmetic", inner, quoted=True),))
            return
        self._forward(len(operator))
        if operator not in ("<<", "<<-"):
            yield _Token("operator", line, operator)
            return
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self._forward(1)
        word = self._word().word
        end = "".join(part.text for part in word)
        self._waiting.append((end, any(part.quoted for part in word), operator == "<<-"))

    def _here_documents(self) -> Iterator[_Token]:
        for end, literal, tabs in self._waiting:
            line, lines = self.line, []
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                row = self._forward(stop + 1 - self.at).rstrip("\n")
                row = row.lstrip("\t") if tabs else row
                if row.strip() == end:
                    break
                lines.append(row + "\n")
            content = "".join(lines)
            word = (Part("text", content, quoted=True),) if literal else parse_parts(content)
            yield _Token("here", line, word=word)
        self._waiting.clear()

    def _word(self) -> _Token:
        line, parts = self.line, list[Part]()
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\r\n" or (self._operator() and not parts):
                break
            if character == "(" and (name := _array_name(parts)):
                return self._array(name, line=line)
            if self._operator():
                if character in "<>" and all(p.kind == "text" and p.text.isdigit() for p in parts):
                    parts.clear()  # the number of a file descriptor
                break
            parts += self._one_part()
        return _Token("word", line, word=_joined(parts))

    def _one_part(self) -> list[Part]:
        character = self.text[self.at]
        if character == MARK[0]:
            return [self._mark()]
        if character == "'":
            end = self._find("'", start=self.at + 1)
            inner = self._forward(end + 1 - self.at)[1:-1]
            return [Part("text", inner, quoted=True)]
        if character == '"':
            self._forward(1)
            return [Part("text", "", quoted=True), *self.quoted_parts(end='"')]
        if character == "\\":
            taken = self._forward(2)
            return [] if taken == "\\\n" else [Part("text", taken[1:], quoted=True)]
        if character in "$`":
            return [self._expansion(quoted=False)]
        return [Part("text", self._plain(), quoted=False)]

    def quoted_parts(self, *, end: str) -> Word:
        """What stands between double quotes, or to the end of the text."""
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == MARK[0]:
                parts.append(self._mark())
            elif end and character == end:
                self._forward(1)
                return _joined(parts)
            elif self.text.startswith("\\\n", self.at):
                self._forward(2)
            elif character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\'):
                parts.append(Part("text", self._forward(2)[1], quoted=True))
            elif character in "$`":
                parts.append(self._expansion(quoted=True))
            else:
                parts.append(Part("text", self._plain(), quoted=True))
        if end:
            raise ScriptError(f"line {self.line}: a quote is opened and never closed")
        return _joined(parts)

    def _mark(self) -> Part:
        """What an evaluated text holds of the unknown is not read a second time."""
        end = self._find(MARK[1], start=self.at)
        return Part("text", self._forward(end + 1 - self.at), quoted=True)

    def _expansion(self, *, quoted: bool) -> Part:
        if self.text[self.at] == "`":
            end = self._find("`", start=self.at + 1)
            return Part("command", self._forward(end + 1 - self.at)[1:-1], quoted=quoted)
        if self.text.startswith("$((", self.at):
            self._forward(1)
            return Part("arithmetic", self._bracketed("((", "))"), quoted=quoted)
        if self.text.startswith("$(", self.at):
            self._forward(1)
            return Part("command", self._bracketed("(", ")"), quoted=quoted)
        if self.text.startswith("${", self.at):
            self._forward(1)
            return Part("variable", self._bracketed("{", "}"), quoted=quoted)
        self._forward(1)
        name = self._forward(_name_length(self.text, self.at))
        return Part("variable", name, quoted) if name else Part("text", "$", quoted=quoted)

    def _bracketed(self, opening: str, closing: str) -> str:
        """What stands between brackets, inner ones included."""
        start, depth, line = self.at + len(opening), 0, self.line
        position = self.at
        while position < len(self.text):
            if self.text[position] == "\\":
                position += 2
            elif self.text[position] in opening[0] + closing[0]:
                depth += 1 if self.text[position] == opening[0] else -1
                position += 1
                if depth == 0:
                    self._forward(position - self.at)
                    return self.text[start : position - len(closing)]
            else:
                position += 1
        raise ScriptError(f"line {line}: {opening} is opened and never closed")

    def _find(self, character: str, *, start: int) -> int:
        end = self.text.find(character, start)
        if end < 0:
            raise ScriptError(f"line {self.line}: {character} is opened and never closed")
        return end

    def _array(self, name: str, *, line: int) -> _Token:
        inner = self._bracketed("(", ")")
        items = tuple(t.word for t in _Lexer(inner).tokens() if t.kind == "word")
        return _Token("array", line, name, items=items)


def _name_length(text: str, at: int) -> int:
    if text[at : at + 1] in tuple("0123456789@*#?!$-"):
        return 1
    length = 0
    while (text[at + length : at + length + 1] + " ")[0].isalnum() or text[
        at + length : at + length + 1
    ] == "_":
        length += 1
    return length


def _array_name(parts: list[Part]) -> str:
    """``NAME=`` or ``NAME+=`` in front of a bracket."""
    text = "".join(part.text for part in parts)
    name = text.removesuffix("=").removesuffix("+")
    return text if text.endswith("=") and name.isidentifier() else ""


def _joined(parts: list[Part]) -> Word:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last and last.kind == part.kind == "text" and last.quoted == part.quoted:
            joined[-1] = Part("text", last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)


@dataclass(slots=True)
class _Parser:
    tokens: list[_Token]
    at: int = 0

    def block(self, *, until: frozenset[str]) -> Block:
        commands: list[Command] = []
        while (token := self._peek()) is not None:
            if token.kind in ("newline", "here") or token.text in (";", "&", "&&", "||"):
                self.at += 1
            elif self._plain(token) in until or token.text in until or token.text == ")":
                break
            else:
                commands.append(self._command())
        return tuple(commands)

    def expect_end(self) -> None:
        token = self._peek()
        if token is not None:
            raise ScriptError(
                f"line {token.line}: {self._plain(token) or token.text!r} is unexpected"
            )

    def _peek(self) -> _Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _plain(self, token: _Token | None) -> str:
        """The token as a bare word, "" for anything else."""
        if token is None or token.kind != "word" or len(token.word) != 1:
            return ""
        part = token.word[0]
        return part.text if part.kind == "text" and not part.quoted else ""

    def _take(self, *words: str) -> None:
        while (token := self._peek()) is not None and (
            token.kind == "newline" or token.text == ";"
        ):
            self.at += 1
        if self._plain(token) not in words:
            line = token.line if token else self.tokens[-1].line
            raise ScriptError(f"line {line}: {words[0]} is expected here")
        self.at += 1

    def _command(self) -> Command:
        token = self._peek()
        assert token is not None
        match self._plain(token):
            case "if":
                return self._if(token.line)
            case "for" | "select":
                return self._for(token.line)
            case "while" | "until":
                return self._while(token.line)
            case "case":
                return self._case(token.line)
            case "function":
                self.at += 1
                return self._function(self._plain(self._peek()))
            case "{":
                return self._group(token.line, "}")
        if token.kind == "operator" and token.text == "(":
            return self._group(token.line, ")")
        following = [t.text for t in self.tokens[self.at + 1 : self.at + 3]]
        if self._plain(token) and following == ["(", ")"]:
            return self._function(self._plain(token))
        return self._simple()

    def _group(self, line: int, end: str) -> If:
        """``{ ... }`` and ``( ... )``: done always."""
        self.at += 1
        body = self.block(until=frozenset((end,)))
        self.at += 1
        return If(line, (), body)

    def _if(self, line: int) -> If:
        branches: list[tuple[Block, Block]] = []
        word = "if"
        while word in ("if", "elif"):
            self.at += 1
            condition = self.block(until=frozenset(("then",)))
            self._take("then")
            branches.append((condition, self.block(until=frozenset(("elif", "else", "fi")))))
            word = self._plain(self._peek())
        otherwise: Block = ()
        if word == "else":
            self.at += 1
            otherwise = self.block(until=frozenset(("fi",)))
        self._take("fi")
        return If(line, tuple(branches), otherwise)

    def _for(self, line: int) -> Loop:
        self.at += 1
        token = self._peek()
        assert token is not None
        variable, words = self._plain(token), list[Word]()
        self.at += 1
        if token.text == "((":
            words.append(token.word)
        elif self._plain(self._peek()) == "in":
            self.at += 1
            while (item := self._peek()) is not None and item.kind == "word":
                words.append(item.word)
                self.at += 1
        self._take("do")
        body = self.block(until=frozenset(("done",)))
        self._take("done")
        self._skip_rest()
        return Loop(line, "for", variable, tuple(words), (), body)

    def _while(self, line: int) -> Loop:
        self.at += 1
        condition = self.block(until=frozenset(("do",)))
        self._take("do")
        body = self.block(until=frozenset(("done",)))
        self._take("done")
        self._skip_rest()
        return Loop(line, "while", "", (), condition, body)

    def _case(self, line: int) -> Case:
        self.at += 1
        token = self._peek()
        assert token is not None
        self.at += 1
        self._take("in")
        branches: list[tuple[tuple[Word, ...], Block]] = []
        while (item := self._peek()) is not None and self._plain(item) != "esac":
            if item.kind == "newline" or item.text in ("(", ";;"):
                self.at += 1
                continue
            patterns: list[Word] = []
            while (item := self._peek()) is not None and item.text != ")":
                if item.kind == "word":
                    patterns.append(item.word)
                self.at += 1
            self.at += 1
            branches.append((tuple(patterns), self.block(until=frozenset((";;", "esac")))))
        self._take("esac")
        return Case(line, token.word, tuple(branches))

    def _function(self, name: str) -> Function:
        self.at += 1
        while (token := self._peek()) is not None and (
            token.kind == "newline" or token.text in ("(", ")")
        ):
            self.at += 1
        body = self._command()
        return Function(name, (body,))

    def _skip_rest(self) -> None:
        """What follows ``done`` on its line: redirections and pipes."""
        while (token := self._peek()) is not None and token.kind != "newline" and token.text != ";":
            self.at += 1

    def _simple(self) -> Simple:
        words: list[Word] = []
        redirects: list[Redirect] = []
        arrays: list[tuple[str, bool, tuple[Word, ...]]] = []
        first = self._peek()
        assert first is not None
        piped, connective = False, ""
        while (token := self._peek()) is not None:
            if token.kind == "word":
                words.append(token.word)
            elif token.kind == "array":
                name = token.text.removesuffix("=")
                arrays.append((name.removesuffix("+"), name.endswith("+"), token.items))
            elif token.kind == "here":
                redirects.append(Redirect("<<", token.word))
                if not self._here_follows():  # its last line ends the command
                    self.at += 1
                    break
            elif token.text in _REDIRECTS:
                self._redirect(token, redirects)
            elif token.kind == "newline" and self._here_follows():
                pass  # the lines of a here-document still belong to this command
            else:
                connective = token.text if token.text in ("&&", "||") else ""
                piped = token.text == "|"
                if piped:
                    self.at += 1
                    self._skip_newlines()
                break
            self.at += 1
        return Simple(first.line, tuple(words), tuple(redirects), tuple(arrays), piped, connective)

    def _redirect(self, token: _Token, redirects: list[Redirect]) -> None:
        target = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else None
        if target is not None and target.kind == "word":
            self.at += 1
            kind = ">>" if token.text.endswith(">>") else token.text
            redirects.append(Redirect(kind, target.word))

    def _here_follows(self) -> bool:
        return self.at + 1 < len(self.tokens) and self.tokens[self.at + 1].kind == "here"

    def _skip_newlines(self) -> None:
        while (token := self._peek()) is not None and token.kind == "newline":
            self.at += 1
