"""Conversations to documents of alternating parts: what is read, what the assistant answers.

The chat template decides the text. Only the template's own marks become special tokens: the
spelling of one inside a message stays text, so nobody can forge a turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mds_data.chat.formats import chat_template
from mds_data.chat.template import ChatTemplate, Message
from mds_data.chat.values import TemplateError
from mds_data.paired.drops import Drop
from mds_data.paired.encode import EncodedParts, pack_parts, without_values
from mds_data.paired.pipeline import PartsConfig, PartsProgress, PartsReport, write_parts
from mds_data.preprocess.inputs import InputFile, InputReader, find_inputs
from mds_data.preprocess.records import RecordError, json_object
from mds_data.preprocess.report import InputRecord
from mds_data.privacy.documents import DocumentRedactor
from mds_data.store.schema import token_dtype
from mds_data.tokenizers.protocol import Tokenizer

__all__ = ["ConversationEncoder", "SFTConfig", "messages_of", "parts_of", "preprocess_sft"]

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_UNUSED = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters of Unicode; one of them breaks the spelling of marks inside messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """What to read and how conversations become text."""

    writing: PartsConfig
    inputs: tuple[str, ...]
    template: str
    """A format's name (``chatml`` ...), or a file or folder that holds a chat template."""
    max_length: int | None = None
    """Drop conversations of more tokens."""


def preprocess_sft(
    config: SFTConfig,
    *,
    on_progress: Callable[[PartsProgress], None] | None = None,
    on_drops: Callable[[Sequence[Drop]], None] | None = None,
) -> PartsReport:
    """Tokenise conversations into a store: parts read and parts learned alternate.

    Raises:
        InputError: A line is broken, or nothing is left.
        TemplateError: The template can't be used.
        StoreError: The output exists.
    """
    chat_template(config.template)  # refuses a bad template before anything is read
    return write_parts(
        _LineSource(find_inputs(config.inputs, format="jsonl")),
        config=config.writing,
        make=_Make(config.template, config.max_length),
        name="preprocess-sft",
        arguments={"template": config.template, "max_length": config.max_length},
        on_progress=on_progress,
        on_drops=on_drops,
    )


@dataclass(frozen=True, slots=True)
class _Make:
    """Builds the encoder in each worker."""

    template: str
    max_length: int | None

    def __call__(
        self, tokenizer: Tokenizer, redactor: DocumentRedactor | None = None
    ) -> ConversationEncoder:
        eos = "" if tokenizer.eod_id is None else tokenizer.pieces()[tokenizer.eod_id]
        template = chat_template(self.template, eos_token=eos)
        return ConversationEncoder(
            tokenizer, template=template, max_length=self.max_length, redactor=redactor
        )


@dataclass(frozen=True, slots=True)
class _Line:
    file: str
    line: int
    data: bytes


class _LineSource:
    """All lines of all inputs, and how much of them was read."""

    def __init__(self, files: Sequence[InputFile]) -> None:
        self._files = files
        self._current: InputReader | None = None
        self.done: list[InputRecord] = []
        self.bytes_total = sum(file.size for file in files)

    @property
    def names(self) -> str:
        return ", ".join(file.path.as_posix() for file in self._files)

    @property
    def bytes_read(self) -> int:
        before = sum(record.size for record in self.done)
        return before + (self._current.bytes_read if self._current is not None else 0)

    def __iter__(self) -> Iterator[_Line]:
        for file in self._files:
            self._current = reader = InputReader(file)
            name = file.path.as_posix()
            for record in reader.records():
                yield _Line(name, record.line, record.data)
            self.done.append(InputRecord(path=name, size=reader.bytes_read, sha256=reader.sha256))
            self._current = None


def messages_of(record: dict[str, Any]) -> list[Message]:
    """The messages of a JSON object in one of the usual shapes.

    ``messages`` (role, content), ``conversations`` (from, value), ``prompt`` and ``completion``, or
    Alpaca's ``instruction``, ``input``, ``output``.

    Raises:
        RecordError: It has none of these shapes.
    """
    if "messages" in record or "conversations" in record:
        given = record.get("messages", record.get("conversations"))
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise RecordError("not-text", "the messages are no list of objects")
        return [_message(each) for each in given]
    if isinstance(record.get("instruction"), str):
        more = record.get("input") or ""
        prompt = f"{record['instruction']}\n\n{more}" if more else record["instruction"]
        return _single_turn(prompt, record.get("output"))
    if isinstance(record.get("prompt"), str):
        return _single_turn(record["prompt"], record.get("completion"))
    raise RecordError(
        "no-key",
        f"no messages, conversations, prompt or instruction "
        f"(it has: {', '.join(list(record)[:5]) or 'none'})",
    )


def _single_turn(prompt: str, answer: object) -> list[Message]:
    if not isinstance(answer, str):
        raise RecordError("not-text", "the prompt has no answer that is text")
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _message(given: dict[str, Any]) -> Message:
    role = given.get("role", given.get("from"))
    content = given.get("content", given.get("value"))
    if not isinstance(role, str) or not isinstance(content, str):
        raise RecordError("not-text", "a message needs a role and a content that are text")
    return {**given, "role": _ROLES.get(role, role), "content": content}


def parts_of(messages: Sequence[Message], template: ChatTemplate) -> list[str]:
    """The text of a conversation, cut into what is read and what is learned, in turn.

    An answer begins where the template would ask for one, so a model learns to answer exactly the
    prompt that it will be given. What follows the last answer is left out.

    Raises:
        TemplateError: The template refuses the conversation, or changes earlier turns.
    """
    parts: list[str] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        whole = template.render(messages[: number + 1])
        prompt = template.render(messages[:number], add_generation_prompt=True)
        if not whole.startswith(prompt):
            prompt = template.render(messages[:number])
        if not whole.startswith(prompt) or not prompt.startswith(done):
            raise TemplateError(
                f"the chat template {template.name} changes earlier turns when a turn is added, so "
                f"the answer can't be told from the prompt; use another template"
            )
        parts += [prompt[len(done) :], whole[len(prompt) :]]
        done = whole
    return parts


class ConversationEncoder:
    """Encodes batches of JSON lines that hold conversations."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate,
        max_length: int | None = None,
        redactor: DocumentRedactor | None = None,
    ) -> None:
        self._redactor = redactor
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._special = tokenizer.special_ids()
        spellings = sorted(filter(None, self._special), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, spellings)) or r"(?!)")

    def __call__(self, batch: Sequence[_Line]) -> EncodedParts:
        """Encode one batch."""
        drops: list[Drop] = []
        documents = []
        for line in batch:
            try:
                parts = self._parts(line, drops)
            except (RecordError, TemplateError) as error:
                drops.append(Drop(line.file, line.line, "broken", str(error)))
                continue
            if parts:
                documents.append(parts)
        packed = pack_parts(documents, dtype=self._dtype, drops=drops)
        return packed if self._redactor is None else without_values(packed, self._redactor)

    def _parts(self, line: _Line, drops: list[Drop]) -> list[list[int]]:
        def drop(kind: Any, detail: str) -> list[list[int]]:
            drops.append(Drop(line.file, line.line, kind, detail))
            return []

        if not line.data.strip():
            return drop("empty", "an empty line")
        messages = messages_of(json_object(line.data))
        if self._redactor is not None:  # all members: a template may show any of them
            messages = self._redactor.value(messages)
        parts = self.encode(messages)
        if not any(parts[1::2]):
            return drop("no-answer", "no answer to learn from")
        length = sum(map(len, parts))
        if self._max_length is not None and length > self._max_length:
            return drop("long", f"{length:,} tokens, more than {self._max_length:,}")
        return parts

    def encode(self, messages: Sequence[Message]) -> list[list[int]]:
        """The ids of each part, read and learned in turn.

        Raises:
            TemplateError: The template refuses the conversation.
            RecordError: The tokenizer refuses it.
        """
        breaker = _breaker(messages)
        texts = parts_of([self._without_marks(each, breaker) for each in messages], self._template)
        try:
            return [self._ids(text, breaker) for text in texts]
        except ValueError as error:
            raise RecordError("refused", str(error)) from None

    def _without_marks(self, message: Message, breaker: str) -> Message:
        """The message with a breaker inside each spelling of a mark."""
        return {
            name: self._marks.sub(lambda found: breaker.join(found[0]), value)
            if isinstance(value, str) and name != "role"
            else value
            for name, value in message.items()
        }

    def _ids(self, text: str, breaker: str) -> list[int]:
        ids: list[int] = []
        place = 0
        for mark in self._marks.finditer(text):
            ids += self._plain(text[place : mark.start()], breaker)
            ids.append(self._special[mark[0]])
            place = mark.end()
        return ids + self._plain(text[place:], breaker)

    def _plain(self, text: str, breaker: str) -> list[int]:
        return self._tokenizer.encode_batch([text.replace(breaker, "")])[0] if text else []


def _breaker(messages: Sequence[Message]) -> str:
    """A character that stands in none of the messages."""
    text = "".join(str(value) for message in messages for value in message.values())
    return next((letter for letter in _UNUSED if letter not in text), _UNUSED[0])
