"""English text that every Python carries: its help topics and its library's documentation.

The library's sources are parsed, never imported, so nothing of them runs. The same Python gives the
same documents in the same order; a distribution that leaves parts of the library out gives fewer.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import re
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CorpusDocument", "sample_corpus"]

# Tests and vendored packages are not documentation; site-packages differ between machines.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "ensurepip", "__pycache__"}
)
_COMMENT_BLOCK = re.compile(r"(?:^[ \t]*#[^!\n].*\n){3,}", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*#+ ?", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z']+")
_COMMON_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "can",
        "for",
        "from",
        "has",
        "if",
        "in",
        "is",
        "it",
        "may",
        "not",
        "of",
        "on",
        "or",
        "that",
        "the",
        "then",
        "this",
        "to",
        "use",
        "used",
        "was",
        "when",
        "which",
        "will",
        "with",
        "you",
        "return",
        "returns",
    ]
)
_SHORTEST = 60
"""Characters; a shorter docstring teaches a heading, not English."""


@dataclass(frozen=True, slots=True)
class CorpusDocument:
    """One text of the sample corpus."""

    source: str
    """Where it stands, such as ``topic:FLOAT`` or ``class:json.decoder.JSONDecoder``."""
    text: str


def sample_corpus(
    *,
    seed: int = 1234,
    library: Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[CorpusDocument]:
    """Yield the sample corpus: one document a help topic, a library module and a library class.

    Args:
        seed: Decides the order in which topics, modules and classes mix.
        library: Folder of Python sources; this Python's standard library when left out.
        on_progress: Called with the number of source files read and their total.

    Returns:
        Documents without duplicates, the same for the same Python and seed.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    documents = sorted(_collect(library, on_progress), key=lambda document: document.source)
    # A hash decides the order: no generator's algorithm can change it from version to version.
    yield from sorted(documents, key=lambda document: _shuffle_key(document.source, seed=seed))


def _shuffle_key(source: str, *, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{source}".encode()).digest()


def _collect(
    library: Path, on_progress: Callable[[int, int], None] | None
) -> Iterator[CorpusDocument]:
    seen: set[str] = set()
    for source, sections in _sources(library, on_progress):
        fresh = [text for text in sections if _is_new(text, seen)]
        text = "\n\n".join(fresh).strip()
        if len(text) >= _SHORTEST and is_prose(text):
            yield CorpusDocument(source=source, text=text + "\n")


def _is_new(text: str, seen: set[str]) -> bool:
    # The first line is the signature, which differs where a docstring was inherited or copied.
    _, _, body = text.partition("\n")
    key = " ".join((body.strip() or text).split())
    known = key in seen
    seen.add(key)
    return not known


def is_prose(text: str) -> bool:
    """Say whether a text looks like English: mostly letters, and common words among them."""
    letters = sum(map(text.count, "etaoinshrdlu"))
    if letters < 0.35 * len(text):
        return False
    words = _WORD.findall(text.lower())
    common = sum(word in _COMMON_WORDS for word in words)
    return len(words) >= 8 and common >= 0.1 * len(words)


def _sources(
    library: Path, on_progress: Callable[[int, int], None] | None
) -> Iterator[tuple[str, list[str]]]:
    """Yield (source, sections) of every topic, module and class."""
    yield from _topics()
    yield from _builtin_classes()
    paths = sorted(_library_files(library), key=lambda path: path.as_posix())
    for number, path in enumerate(paths, start=1):
        yield from _module_sections(path, name=_module_name(path.relative_to(library)))
        if on_progress is not None:
            on_progress(number, len(paths))


def _topics() -> Iterator[tuple[str, list[str]]]:
    # pydoc's own data: plain text of the language reference, one topic a key.
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield f"topic:{name}", [text.strip()]


def _builtin_classes() -> Iterator[tuple[str, list[str]]]:
    """Documentation of int, str, dict and the other types that have no Python source."""
    functions = []
    for name, value in sorted(vars(builtins).items()):
        if getattr(value, "__module__", None) != "builtins":
            continue  # site and interactive tools add their own names here.
        if isinstance(value, type):
            yield f"class:builtins.{name}", [_described(name, value), *_methods(value)]
        elif isinstance(value, types.BuiltinFunctionType):
            functions.append(_described(name, value))
    yield "module:builtins", functions


def _methods(owner: type) -> list[str]:
    return [
        _described(name, value)
        for name, value in sorted(vars(owner).items())
        if not name.startswith("_") and inspect.getdoc(value)
    ]


def _described(name: str, value: object) -> str:
    return f"{name}\n\n{inspect.getdoc(value) or ''}"


def _library_files(library: Path) -> Iterator[Path]:
    for path in library.rglob("*.py"):
        parts = path.relative_to(library).parts
        machine_made = parts[0].startswith(("_sysconfigdata", "config-", "lib-dynload"))
        if not machine_made and not _LEFT_OUT.intersection(parts):
            yield path


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _module_sections(path: Path, *, name: str) -> Iterator[tuple[str, list[str]]]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return  # Some library files are wrong on purpose (bad encodings, Python 2 fixtures).
    room = _Room(f"module:{name}", first=0, last=len(source), sections=[])
    rooms = [room]
    docstring = ast.get_docstring(tree)
    if docstring:
        room.sections.append((0, f"{name}\n\n{docstring}"))
    _walk(tree.body, prefix=name, room=room, rooms=rooms)
    for line, comment in _comment_blocks(source):
        _innermost(rooms, line).sections.append((line, comment))
    for each in rooms:
        yield each.source, [text for _, text in sorted(each.sections)]


@dataclass(frozen=True, slots=True)
class _Room:
    """A module or a class, the lines that it takes, and what is said in them."""

    source: str
    first: int
    last: int
    sections: list[tuple[int, str]]


def _innermost(rooms: Iterable[_Room], line: int) -> _Room:
    around = (room for room in rooms if room.first <= line <= room.last)
    return min(around, key=lambda room: room.last - room.first)


def _walk(body: list[ast.stmt], *, prefix: str, room: _Room, rooms: list[_Room]) -> None:
    """Put docstrings of functions into the room around them; each class opens a new room."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = f"{prefix}.{node.name}"
            inner = _Room(
                f"class:{name}", first=node.lineno, last=node.end_lineno or node.lineno, sections=[]
            )
            rooms.append(inner)
            inner.sections.append((node.lineno, f"{name}\n\n{ast.get_docstring(node) or ''}"))
            _walk(node.body, prefix=name, room=inner, rooms=rooms)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                heading = f"{node.name}({ast.unparse(node.args)})"
                room.sections.append((node.lineno, f"{heading}\n\n{docstring}"))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            _walk(node.body, prefix=prefix, room=room, rooms=rooms)


def _comment_blocks(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the comments that are paragraphs of English, not remarks or code."""
    line, position = 1, 0
    for match in _COMMENT_BLOCK.finditer(source):
        line += source.count("\n", position, match.start())
        position = match.start()
        text = inspect.cleandoc(_COMMENT_MARK.sub("", match.group()))
        if len(text) >= 2 * _SHORTEST and is_prose(text):
            yield line, text
