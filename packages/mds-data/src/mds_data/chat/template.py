"""Render a model's chat template: the part of Jinja that such templates use, and no code at all.

White space follows transformers: ``trim_blocks`` and ``lstrip_blocks`` are on.
"""

from __future__ import annotations

import json
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_data.chat.expressions import Evaluate, parse_expression
from mds_data.chat.values import Namespace, TemplateError, Undefined, text
from mds_data.tokenizers.protocol import read_model_file

__all__ = ["ChatTemplate", "Message", "chat_template_of", "load_chat_template"]

Message = Mapping[str, Any]

_TAG = re.compile(r"(\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\})", re.DOTALL)
_MOST_STEPS = 10**5
_LARGEST_TEMPLATE = 2**20
_TEMPLATE, _SETTINGS = "chat_template.jinja", "tokenizer_config.json"
_Scope = ChainMap[str, Any]
_Render = Callable[[_Scope, list[str]], None]


class ChatTemplate:
    """One chat template, parsed.

    Args:
        source: The template's text.
        variables: What it may name besides the messages, such as ``bos_token``.
        name: How messages call it.

    Raises:
        TemplateError: It is broken, or uses what is not supported.
    """

    def __init__(
        self, source: str, *, variables: Mapping[str, Any] | None = None, name: str = "template"
    ) -> None:
        if len(source) > _LARGEST_TEMPLATE:
            raise TemplateError(f"{name}: a chat template of {len(source)} characters is refused")
        self.source = source
        self.name = name
        self.variables = dict(variables or {})
        pieces = _pieces(source.removesuffix("\n"))
        try:
            self._body, rest = _parse(pieces, 0, ends=())
        except RecursionError:
            raise TemplateError(f"{name}: the chat template is nested too deeply") from None
        if rest != len(pieces):
            raise TemplateError(f"{name}: {pieces[rest][1]!r} has no beginning")

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text of a conversation.

        Raises:
            TemplateError: The template refused the conversation, or asked for what is not there.
        """
        scope: _Scope = ChainMap(
            {},
            {
                **self.variables,
                "messages": list(messages),
                "add_generation_prompt": add_generation_prompt,
                "raise_exception": _refuse,
                "namespace": Namespace,
                "range": _range,
                "dict": dict,
                " steps": [0],
            },
        )
        output: list[str] = []
        try:
            self._body(scope, output)
        except RecursionError:
            raise TemplateError(f"{self.name}: the chat template is nested too deeply") from None
        return "".join(output)


def _refuse(message: str) -> None:
    raise TemplateError(f"the chat template refuses the conversation: {message}")


def _range(*numbers: int) -> list[int]:
    return list(range(*numbers)[:_MOST_STEPS])


def load_chat_template(path: Path) -> ChatTemplate:
    """The chat template in a file or folder.

    Args:
        path: A ``.jinja`` file, a ``tokenizer_config.json``, or a folder that holds one of both.

    Raises:
        TemplateError: There is none in it, or it is not supported.
        FileNotFoundError: There is no such file.
    """
    if path.is_dir():
        found = [path / _TEMPLATE, path / _SETTINGS]
        path = next((each for each in found if each.is_file()), found[0])
    content = read_model_file(path).decode("utf-8", "replace")
    if path.suffix != ".json":
        beside = path.with_name(_SETTINGS)
        config = _config(beside, read_model_file(beside).decode()) if beside.is_file() else {}
        return ChatTemplate(content, variables=_marks(config), name=path.name)
    return _in_settings(_config(path, content), name=path)


def chat_template_of(files: Mapping[str, str]) -> ChatTemplate | None:
    """The chat template among a model's files, or None; for files that are nowhere to be opened.

    Args:
        files: Texts by name; ``chat_template.jinja`` and ``tokenizer_config.json`` count.

    Raises:
        TemplateError: It is not supported.
    """
    config = _config(Path(_SETTINGS), files[_SETTINGS]) if _SETTINGS in files else {}
    if _TEMPLATE in files:
        return ChatTemplate(files[_TEMPLATE], variables=_marks(config), name=_TEMPLATE)
    return _in_settings(config, name=Path(_SETTINGS)) if "chat_template" in config else None


def _in_settings(config: Mapping[str, Any], *, name: Path) -> ChatTemplate:
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template if each}
        template = named.get("default")
    if not isinstance(template, str):
        raise TemplateError(f"{name}: holds no chat_template; give one by name or as a .jinja file")
    return ChatTemplate(template, variables=_marks(config), name=name.name)


def _config(path: Path, content: str) -> dict[str, Any]:
    try:
        config = json.loads(content)
    except (ValueError, RecursionError):
        raise TemplateError(f"{path}: is no JSON file") from None
    return config if isinstance(config, dict) else {}


def _marks(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, which are strings or objects with a content."""
    marks = {}
    for name, value in config.items():
        if name.endswith("_token"):
            spelling = value.get("content") if isinstance(value, dict) else value
            if isinstance(spelling, str):
                marks[name] = spelling
    return marks


def _pieces(source: str) -> list[tuple[str, str]]:
    """Text and tags in turn, white space already taken off: kind and content of each."""
    pieces: list[tuple[str, str]] = []
    strip_next, trim_next, begins_line = False, False, True
    for part in _TAG.split(source):
        if not _TAG.fullmatch(part):
            plain = part
            if strip_next:
                plain = plain.lstrip()
            elif trim_next:
                plain = plain.removeprefix("\n")
            pieces.append(("text", plain))
            begins_line = "\n" in part or not pieces[:-1]
            continue
        kind = {"{%": "block", "{{": "show", "{#": "comment"}[part[:2]]
        inner = part[2:-2]
        before = pieces[-1][1]
        if inner.startswith("-"):
            before = before.rstrip()
        elif kind != "show" and not inner.startswith("+"):
            line = before[before.rfind("\n") + 1 :]
            if begins_line and not line.strip():
                before = before[: len(before) - len(line)]
        pieces[-1] = ("text", before)
        strip_next, trim_next = inner.endswith("-"), kind != "show"
        pieces.append((kind, inner.strip("-+").strip() if kind != "show" else inner.strip("-")))
    return pieces


def _parse(
    pieces: list[tuple[str, str]], place: int, *, ends: tuple[str, ...]
) -> tuple[_Render, int]:
    """Parse until a block that ends this one; what renders it, and where it ended."""
    body: list[_Render] = []
    while place < len(pieces):
        kind, content = pieces[place]
        word = content.split(None, 1)[0] if kind == "block" and content else ""
        if kind == "block" and word in ends:
            break
        if kind == "text" and content:
            body.append(_plain(content))
        elif kind == "show":
            body.append(_shown(parse_expression(content)))
        elif kind == "block":
            if word not in _BLOCKS:
                if word.startswith(("end", "el")):
                    break
                raise TemplateError(f"the chat template's block {word!r} is not supported")
            rendered, place = _BLOCKS[word](pieces, place)
            body.append(rendered)
            continue
        place += 1

    def render(scope: _Scope, output: list[str]) -> None:
        for part in body:
            part(scope, output)

    return render, place


def _plain(content: str) -> _Render:
    return lambda _, output: output.append(content)


def _shown(value: Evaluate) -> _Render:
    return lambda scope, output: output.append(text(value(scope)))


def _block_if(pieces: list[tuple[str, str]], place: int) -> tuple[_Render, int]:
    branches: list[tuple[Evaluate, _Render]] = []
    otherwise: _Render | None = None
    while True:
        word, _, condition = pieces[place][1].partition(" ")
        ends = ("elif", "else", "endif")
        body, place = _parse(pieces, place + 1, ends=ends)
        if word == "else":
            otherwise = body
        else:
            branches.append((parse_expression(condition), body))
        if _word(pieces, place, "if") == "endif":
            break

    def render(scope: _Scope, output: list[str]) -> None:
        for condition, body in branches:
            if condition(scope):
                body(scope, output)
                return
        if otherwise is not None:
            otherwise(scope, output)

    return render, place + 1


_FOR = re.compile(r"for\s+(\w+(?:\s*,\s*\w+)*)\s+in\s+(.*)", re.DOTALL)


def _block_for(pieces: list[tuple[str, str]], place: int) -> tuple[_Render, int]:
    match = _FOR.fullmatch(pieces[place][1])
    if match is None:
        raise TemplateError(f"the chat template's {pieces[place][1]!r} is not supported")
    names = [name.strip() for name in match[1].split(",")]
    source, condition = _split_condition(match[2])
    body, place = _parse(pieces, place + 1, ends=("endfor",))
    _word(pieces, place, "for")

    def render(scope: _Scope, output: list[str]) -> None:
        values = source(scope)
        inner = scope.new_child()
        chosen = []
        for value in () if isinstance(values, Undefined) else _iterated(values):
            _bind(inner, names, value)
            if condition is None or condition(inner):
                chosen.append(value)
        for number, value in enumerate(chosen):
            scope[" steps"][0] += 1
            if scope[" steps"][0] > _MOST_STEPS:
                raise TemplateError("the chat template loops without end")
            inner = scope.new_child()
            inner["loop"] = _loop(chosen, number)
            _bind(inner, names, value)
            body(inner, output)

    return render, place + 1


def _split_condition(source: str) -> tuple[Evaluate, Evaluate | None]:
    """``messages if message.role`` of a loop; an ``else`` makes it a plain condition."""
    head, word, tail = source.partition(" if ")
    if word and " else " not in tail:
        return parse_expression(head), parse_expression(tail)
    return parse_expression(source), None


def _iterated(values: object) -> Iterable[Any]:
    if isinstance(values, str | list | tuple | Mapping):
        return values
    raise TemplateError(f"the chat template loops over a {type(values).__name__}")


def _bind(scope: _Scope, names: list[str], value: Any) -> None:
    if len(names) == 1:
        scope[names[0]] = value
        return
    if not isinstance(value, list | tuple) or len(value) != len(names):
        raise TemplateError(f"the chat template's loop gives no {len(names)} values at a time")
    for name, each in zip(names, value, strict=True):
        scope[name] = each


def _loop(values: list[Any], number: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "index": number + 1,
        "index0": number,
        "revindex": len(values) - number,
        "revindex0": len(values) - number - 1,
        "first": number == 0,
        "last": number == len(values) - 1,
        "length": len(values),
    }
    if number:
        facts["previtem"] = values[number - 1]
    if number + 1 < len(values):
        facts["nextitem"] = values[number + 1]
    return facts


_SET = re.compile(r"set\s+(\w+)(?:\.(\w+))?\s*=(?!=)(.*)", re.DOTALL)


def _block_set(pieces: list[tuple[str, str]], place: int) -> tuple[_Render, int]:
    match = _SET.fullmatch(pieces[place][1])
    if match is None:
        raise TemplateError(f"the chat template's {pieces[place][1]!r} is not supported")
    name, member, value = match[1], match[2], parse_expression(match[3])

    def render(scope: _Scope, _: list[str]) -> None:
        if member is None:
            scope[name] = value(scope)
            return
        target = scope.get(name)
        if not isinstance(target, Namespace):
            raise TemplateError(f"the chat template sets a member of {name!r}, no namespace")
        target[member] = value(scope)

    return render, place + 1


def _block_generation(pieces: list[tuple[str, str]], place: int) -> tuple[_Render, int]:
    """What transformers marks as the assistant's; answers are found in another way here."""
    body, place = _parse(pieces, place + 1, ends=("endgeneration",))
    _word(pieces, place, "generation")
    return body, place + 1


def _word(pieces: list[tuple[str, str]], place: int, block: str) -> str:
    if place >= len(pieces):
        raise TemplateError(f"the chat template's block {block!r} has no end")
    return pieces[place][1].split(None, 1)[0]


_BLOCKS: dict[str, Callable[[list[tuple[str, str]], int], tuple[_Render, int]]] = {
    "if": _block_if,
    "for": _block_for,
    "set": _block_set,
    "generation": _block_generation,
}
