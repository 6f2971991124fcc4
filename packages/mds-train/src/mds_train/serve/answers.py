"""Writes answers as OpenAI's interface has them: whole, or piece by piece."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mds_train.generate.request import Token
from mds_train.serve.protocol import Asked
from mds_train.serve.worker import Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["DONE", "Writer", "event"]

DONE = "data: [DONE]\n\n"


def event(members: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(members, ensure_ascii=False)}\n\n"


class Writer:
    """Writes the answer to one HTTP request.

    Args:
        asked: What was asked for.
        tokenizer: Names the tokens.
        model: What the model is called.
    """

    def __init__(self, asked: Asked, tokenizer: Tokenizer, *, model: str) -> None:
        self._asked, self._tokenizer = asked, tokenizer
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        name = "chat.completion" if asked.is_chat else "text_completion"
        chunked = f"{name}.chunk" if asked.is_chat and asked.stream else name
        self._head: dict[str, Any] = {
            "id": f"{kind}-{secrets.token_hex(12)}",
            "object": chunked,
            "created": int(time.time()),
            "model": model,
        }
        self._lengths = [0] * len(asked.requests)
        self._begun = [False] * len(asked.requests)
        self.new_tokens = 0

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer, from all pieces of each request."""
        choices = [self._choice(number, _joined(each)) for number, each in enumerate(pieces)]
        return {**self._head, "choices": choices, "usage": self.usage()}

    def chunks(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        """The next chunks of a stream."""
        if not self._asked.is_chat:
            return [self._chunk(self._choice(number, piece))]
        chunks = []
        if not self._begun[number]:
            self._begun[number] = True
            delta = {"role": "assistant", "content": ""}
            chunks.append(self._chunk({"index": number, "delta": delta, "finish_reason": None}))
        choice = self._choice(number, piece)
        content = choice.pop("message")["content"]
        choice["delta"] = {"content": content} if content else {}
        return [*chunks, self._chunk(choice)]

    def last_chunk(self) -> dict[str, Any]:
        """The chunk that tells the usage, where it was asked for."""
        return {**self._head, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens read and written."""
        read = self._asked.prompt_tokens
        return {
            "prompt_tokens": read,
            "completion_tokens": self.new_tokens,
            "total_tokens": read + self.new_tokens,
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._head, "choices": [choice], **usage}

    def _choice(self, number: int, piece: Piece) -> dict[str, Any]:
        self.new_tokens += len(piece.tokens)
        first = self._lengths[number] == 0 and not self._begun[number]
        text = piece.text
        if not self._asked.is_chat:
            self._begun[number] = True
            text = self._asked.prompts[number] + text if first else text
        choice: dict[str, Any] = {"index": number, "finish_reason": piece.finish_reason}
        wanted = self._asked.requests[number].logprobs is not None
        if self._asked.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
            choice["logprobs"] = {"content": self._chat_logprobs(piece)} if wanted else None
        else:
            choice["text"] = text
            choice["logprobs"] = self._logprobs(number, piece) if wanted else None
        return choice

    def _name(self, token: int) -> str:
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def _logprobs(self, number: int, piece: Piece) -> dict[str, Any]:
        tokens = [*piece.prompt_tokens, *piece.tokens]
        names, offsets = [self._name(token.id) for token in tokens], []
        for name in names:
            offsets.append(self._lengths[number])
            self._lengths[number] += len(name)
        likeliest = [{self._name(each): value for each, value in token.top} for token in tokens]
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [top or None for top in likeliest],
            "text_offset": offsets,
        }

    def _chat_logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        return [
            {
                **self._likelihood(token.id, token.logprob),
                "top_logprobs": [self._likelihood(each, value) for each, value in token.top],
            }
            for token in piece.tokens
        ]

    def _likelihood(self, token: int, logprob: float | None) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}


def _joined(pieces: Sequence[Piece]) -> Piece:
    tokens: list[Token] = [token for piece in pieces for token in piece.tokens]
    return Piece(
        text="".join(piece.text for piece in pieces),
        tokens=tuple(tokens),
        prompt_tokens=pieces[0].prompt_tokens,
        finish_reason=pieces[-1].finish_reason,
    )
