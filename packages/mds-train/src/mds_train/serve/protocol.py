"""Reads requests of OpenAI's interface: what is to be continued, and how.

Beyond OpenAI's members it knows top_k, min_p and repetition_penalty, as other servers do.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mds_data.chat.template import ChatTemplate
from mds_data.chat.values import TemplateError
from mds_train.generate.request import Request
from mds_train.generate.sampling import Sampling
from mds_train.serve.api_error import ApiError
from mds_train.serve.members import Members

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Asked", "Limits", "Reader"]

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop")
_COMMON = frozenset((*_SAMPLING, *_PENALTIES, "model", "n", "stream", "stream_options", "logprobs"))
_COMPLETION = _COMMON | {"prompt", "max_tokens", "echo", "best_of"}
_CHAT = _COMMON | {"messages", "max_tokens", "max_completion_tokens", "top_logprobs"}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MARKS = (
    ("<|", r"<\|[^|<>\s]{1,40}\|>"),
    ("[INST]", r"\[/?INST\]"),
    ("<<SYS>>", r"<</?SYS>>"),
    ("_of_turn>", r"<(?:start|end)_of_turn>"),
    ("</s>", r"</?s>"),
)
_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
)
_UNSUPPORTED = (
    *("suffix", "tools", "tool_choice", "functions", "function_call", "response_format"),
    *("audio", "modalities", "prediction", "web_search_options", "parallel_tool_calls"),
    *("reasoning_effort", "verbosity", "prompt_cache_retention"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How much one request may ask for."""

    prompts: int = 128
    samples: int = 16
    """Answers to a prompt."""
    messages: int = 1000
    new_tokens: int | None = None
    """As many as fit when None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What one HTTP request asks for."""

    requests: tuple[Request, ...]
    """The samples of the first prompt, then of the second."""
    prompts: tuple[str, ...]
    """The text of each request's prompt, to be echoed; empty if not."""
    prompt_tokens: int
    """Of all prompts, each counted once."""
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    is_chat: bool


class Reader:
    """Turns JSON into requests.

    Args:
        tokenizer: Of the model.
        end_tokens: Tokens that end an answer.
        template: How conversations are written; None where there is none.
        max_length: Most tokens of a sequence.
        vocab_size: Tokens of the model.
        names: What the model may be called.
        limits: How much one request may ask for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        template: ChatTemplate | None,
        max_length: int,
        vocab_size: int,
        names: frozenset[str],
        limits: Limits | None = None,
    ) -> None:
        self.tokenizer, self.end_tokens, self._template = tokenizer, end_tokens, template
        self.max_length, self._vocab_size, self._names = max_length, vocab_size, names
        self.limits = limits or Limits()
        added = tokenizer.get_added_tokens_decoder().values()
        self._marks = _marks([token.content for token in added if token.special], template)

    def completion(self, members: Members) -> Asked:
        """Read a request for completions.

        Raises:
            ApiError: If it is wrong or asks for too much.
        """
        self._refuse(members, known=_COMPLETION)
        prompts = self._prompts(members.get("prompt"))
        samples = self._samples(members)
        best_of = members.whole("best_of", samples, least=1)
        if best_of != samples:
            raise ApiError(400, "best_of must equal n here.", parameter="best_of")
        echo = members.flag("echo")
        logprobs = members.whole("logprobs", None, least=0, most=20)
        fitting = [self._new_tokens(members, "max_tokens", each, default=16) for each in prompts]
        texts = [self.tokenizer.decode(each) if echo else "" for each in prompts]
        return self._asked(
            members,
            prompts=prompts,
            new_tokens=fitting,
            texts=texts,
            samples=samples,
            logprobs=logprobs,
            prompt_logprobs=echo and logprobs is not None,
            is_chat=False,
        )

    def chat(self, members: Members) -> Asked:
        """Read a request for the next message of a conversation.

        Raises:
            ApiError: If it is wrong or asks for too much, or there is no chat template.
        """
        self._refuse(members, known=_CHAT)
        if self._template is None:
            raise ApiError(
                400,
                "The model has no chat template, so it knows no conversations; use "
                "/v1/completions, or start the server with --chat-template.",
                code="no_chat_template",
            )
        messages = self._messages(members.get("messages"))
        try:
            text = self._template.render(messages, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"{error}.", parameter="messages") from error
        prompt = self._encode(text, begin=False)
        top = members.whole("top_logprobs", 0, least=0, most=20)
        name = (
            "max_tokens"
            if members.get("max_completion_tokens") is None
            else ("max_completion_tokens")
        )
        return self._asked(
            members,
            prompts=[prompt],
            new_tokens=[self._new_tokens(members, name, prompt, default=None)],
            texts=[""],
            samples=self._samples(members),
            logprobs=top if members.flag("logprobs") else None,
            prompt_logprobs=False,
            is_chat=True,
        )

    def _asked(
        self,
        members: Members,
        *,
        prompts: Sequence[list[int]],
        new_tokens: Sequence[int],
        texts: Sequence[str],
        samples: int,
        logprobs: int | None,
        prompt_logprobs: bool,
        is_chat: bool,
    ) -> Asked:
        sampling = self._sampling(members)
        seed = members.whole("seed", None, least=-(2**63), most=2**63 - 1)
        seed = secrets.randbits(31) if seed is None else seed % 2**32
        requests = [
            Request(
                prompt=tuple(prompt),
                max_new_tokens=count,
                sampling=sampling,
                seed=seed + number * samples + sample,
                end_tokens=self.end_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            for number, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
            for sample in range(samples)
        ]
        return Asked(
            requests=tuple(requests),
            prompts=tuple(text for text in texts for _ in range(samples)),
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            stop=members.strings("stop", most=16),
            stream=members.flag("stream"),
            include_usage=self._wants_usage(members),
            is_chat=is_chat,
        )

    def _refuse(self, members: Members, *, known: frozenset[str]) -> None:
        members.refuse_unknown(known=known, ignored=_IGNORED, unsupported=_UNSUPPORTED)
        name = members.get("model")
        if name is not None and name not in self._names:
            shown = f"{name!r:.60}"
            raise ApiError(
                404,
                f"There is no model {shown}; /v1/models lists what is served.",
                parameter="model",
                code="model_not_found",
            )

    def _samples(self, members: Members) -> int:
        return members.whole("n", 1, least=1, most=self.limits.samples) or 1

    def _wants_usage(self, members: Members) -> bool:
        options = members.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, dict):
            raise ApiError(400, "stream_options must be an object.", parameter="stream_options")
        return Members(options).flag("include_usage")

    def _prompts(self, given: Any) -> list[list[int]]:
        """A text, texts, tokens, or lists of tokens."""
        if isinstance(given, str):
            return [self._encode(given, begin=True)]
        if not isinstance(given, list) or not given:
            raise ApiError(400, "prompt must be a text, or a list of them.", parameter="prompt")
        if all(type(each) is int for each in given):
            return [self._tokens(given)]
        if len(given) > self.limits.prompts:
            raise ApiError(
                400,
                f"There are {len(given)} prompts; send at most {self.limits.prompts} at once.",
                parameter="prompt",
            )
        return [
            self._encode(each, begin=True) if isinstance(each, str) else self._tokens(each)
            for each in given
        ]

    def _tokens(self, given: Any) -> list[int]:
        fits = isinstance(given, list) and given and all(type(each) is int for each in given)
        if not fits or not all(0 <= each < self._vocab_size for each in given):
            raise ApiError(
                400,
                f"A prompt must be a text, or tokens from 0 to {self._vocab_size - 1}.",
                parameter="prompt",
            )
        return list(given)

    def _encode(self, text: str, *, begin: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair
            raise ApiError(400, "The text is not valid Unicode.", parameter="prompt") from error
        tokens = list(self.tokenizer.encode(text, add_special_tokens=begin).ids)
        if not tokens and self.end_tokens:
            return [min(self.end_tokens)]  # a text from nothing
        if not tokens:
            raise ApiError(400, "The prompt is empty.", parameter="prompt")
        return tokens

    def _messages(self, given: Any) -> list[dict[str, str]]:
        if not isinstance(given, list) or not given:
            raise ApiError(400, "messages must be a list of messages.", parameter="messages")
        if len(given) > self.limits.messages:
            raise ApiError(
                400, f"Send at most {self.limits.messages} messages.", parameter="messages"
            )
        return [self._message(number, each) for number, each in enumerate(given)]

    def _message(self, number: int, given: Any) -> dict[str, str]:
        place = f"messages[{number}]"
        if not isinstance(given, dict) or given.get("role") not in _ROLES:
            raise ApiError(400, f"{place} must have a role ({', '.join(_ROLES)}).", parameter=place)
        content = given.get("content")
        if isinstance(content, list):  # parts; only texts are understood
            parts = [part.get("text") for part in content if _is_text_part(part)]
            content = "".join(parts) if len(parts) == len(content) else None
        if not isinstance(content, str):
            raise ApiError(400, f"{place} must have a text as its content.", parameter=place)
        # Else whoever writes one message could write the end of it and the next one too.
        if (mark := self._marks.search(content)) is not None:
            raise ApiError(
                400,
                f"{place} contains {mark[0]!r}, which the model reads as a mark and not as text; "
                "leave it out.",
                parameter=place,
                code="special_token",
            )
        return {"role": given["role"], "content": content}

    def _new_tokens(
        self, members: Members, name: str, prompt: list[int], *, default: int | None
    ) -> int:
        room = self.max_length - len(prompt)
        asked = members.whole(name, default, least=0)
        wanted = asked if members.get(name) is not None and asked is not None else 1
        if room < wanted:
            raise ApiError(
                400,
                f"The model reads {self.max_length} tokens at most; the prompt has {len(prompt)} "
                f"and {wanted} new ones are asked for.",
                parameter=name,
                code="context_length_exceeded",
            )
        most = room if self.limits.new_tokens is None else min(room, self.limits.new_tokens)
        return most if asked is None else min(asked, most)

    def _sampling(self, members: Members) -> Sampling:
        return Sampling(
            temperature=members.number("temperature", 1.0, least=0.0, most=100.0),
            top_k=max(members.whole("top_k", 0, least=-1) or 0, 0),  # -1 is "all" elsewhere
            top_p=members.number("top_p", 1.0, least=0.0, most=1.0) or 1e-9,
            min_p=members.number("min_p", 0.0, least=0.0, most=1.0),
            repetition_penalty=members.number("repetition_penalty", 1.0, least=1e-2, most=100.0),
            presence_penalty=members.number("presence_penalty", 0.0, least=-2.0, most=2.0),
            frequency_penalty=members.number("frequency_penalty", 0.0, least=-2.0, most=2.0),
            logit_bias=self._biases(members.get("logit_bias")),
        )

    def _biases(self, given: Any) -> tuple[tuple[int, float], ...]:
        if given is None:
            return ()
        fits = isinstance(given, dict) and all(
            token.isascii()
            and token.isdigit()
            and int(token) < self._vocab_size
            and type(value) in (int, float)
            and -100 <= value <= 100
            for token, value in given.items()
        )
        if not fits or len(given) > 1024:
            raise ApiError(
                400,
                "logit_bias must map up to 1024 tokens to numbers between -100 and 100.",
                parameter="logit_bias",
            )
        return tuple((int(token), float(value)) for token, value in given.items())


def _marks(special: Sequence[str], template: ChatTemplate | None) -> re.Pattern[str]:
    """What no message may contain: the tokenizer's special tokens, and the template's marks.

    A template may write marks that are ordinary tokens; those of the usual spellings are known.
    """
    spelled = [re.escape(text) for text in special if text]
    if template is not None:
        spelled += [form for sign, form in _MARKS if sign in template.source]
    return re.compile("|".join(spelled) or r"(?!)")


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )
