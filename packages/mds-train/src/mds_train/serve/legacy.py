"""Megatron's own interface, PUT /api, with its members and its defaults."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mds_train.generate.beams import BeamSearch
from mds_train.generate.request import Request
from mds_train.generate.sampling import Sampling
from mds_train.serve.api_error import ApiError
from mds_train.serve.members import Members
from mds_train.serve.worker import Piece

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from mds_train.serve.protocol import Limits

__all__ = ["LegacyAsked", "legacy_answer", "read_legacy"]

_KNOWN = frozenset(
    (
        *("prompts", "tokens_to_generate", "logprobs", "temperature", "top_k", "top_p"),
        *("top_p_decay", "top_p_bound", "add_BOS", "stop_on_double_eol", "stop_on_eol"),
        *("prevent_newline_after_colon", "random_seed", "beam_width", "stop_token"),
        *("length_penalty",),
    )
)
_IGNORED = frozenset(("no_log",))  # nothing is ever logged


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyAsked:
    """What a PUT asks for: sequences, or a beam search for one prompt."""

    requests: tuple[Request, ...]
    stop: tuple[str, ...]
    search: BeamSearch | None
    wants_logprobs: bool


def read_legacy(
    members: Members,
    tokenizer: Tokenizer,
    *,
    end_tokens: frozenset[int],
    limits: Limits,
    max_length: int,
) -> LegacyAsked:
    """Read a request.

    Raises:
        ApiError: If it is wrong or asks for too much.
    """
    members.refuse_unknown(known=_KNOWN, ignored=_IGNORED, unsupported=())
    prompts = _prompts(members, most=limits.prompts)
    count = members.whole("tokens_to_generate", 64, least=0) or 0
    wants = members.flag("logprobs")
    if count == 0 and not wants:
        raise ApiError(
            400, "tokens_to_generate=0 makes sense with logprobs only.", parameter="logprobs"
        )
    model = Request(
        prompt=(),
        max_new_tokens=count if limits.new_tokens is None else min(count, limits.new_tokens),
        sampling=_sampling(members, tokenizer),
        seed=_seed(members),
        end_tokens=_ends(members, end_tokens),
        logprobs=0 if wants else None,
        prompt_logprobs=wants,
    )
    begin = [min(end_tokens)] if members.flag("add_BOS") and end_tokens else []
    requests = tuple(
        replace(model, prompt=(*begin, *tokenizer.encode(text).ids), seed=model.seed + number)
        for number, text in enumerate(prompts)
    )
    _check_lengths(requests, count=count, most=max_length)
    return LegacyAsked(
        requests=requests,
        stop=_stops(members),
        search=_search(members, prompts),
        wants_logprobs=wants,
    )


def _prompts(members: Members, *, most: int) -> tuple[str, ...]:
    prompts = members.strings("prompts", most=most)
    if not prompts or isinstance(members.get("prompts"), str):
        raise ApiError(400, f"prompts must be a list of 1 to {most} texts.", parameter="prompts")
    if any(_is_broken(text) for text in prompts):
        raise ApiError(400, "A prompt is not valid Unicode.", parameter="prompts")
    return prompts


def _seed(members: Members) -> int:
    """As asked for; -1 leaves it to chance."""
    seed = members.whole("random_seed", -1, least=-1, most=2**63 - 1)
    return secrets.randbits(31) if seed is None or seed == -1 else seed


def _ends(members: Members, usual: frozenset[int]) -> frozenset[int]:
    token = members.whole("stop_token", None, least=0)
    return usual if token is None else frozenset({token})


def _check_lengths(requests: Sequence[Request], *, count: int, most: int) -> None:
    for request in requests:
        if len(request.prompt) + count > most:
            raise ApiError(
                400,
                f"A prompt has {len(request.prompt)} tokens and {count} new ones are asked for, "
                f"but the model reads {most} at most.",
                parameter="tokens_to_generate",
            )


def _is_broken(text: str) -> bool:
    """Whether there is half of a surrogate pair."""
    return any(0xD800 <= ord(letter) < 0xE000 for letter in text)


def _sampling(members: Members, tokenizer: Tokenizer) -> Sampling:
    top_k = members.whole("top_k", 0, least=0, most=1000) or 0
    top_p = members.number("top_p", 0.0, least=0.0, most=1.0)
    if top_k > 0 and top_p > 0.0:
        raise ApiError(400, "top_k and top_p cannot both be set.", parameter="top_p")
    decay = members.number("top_p_decay", 0.0, least=0.0, most=1.0)
    if decay > 0.0 and top_p == 0.0:
        raise ApiError(400, "top_p_decay needs a top_p.", parameter="top_p_decay")
    bound = members.number("top_p_bound", 0.0, least=0.0, most=1.0)
    if bound > 0.0 and (top_p == 0.0 or bound > top_p):
        raise ApiError(400, "top_p_bound must not exceed top_p.", parameter="top_p_bound")
    forbidden: tuple[tuple[int, int], ...] = ()
    if members.flag("prevent_newline_after_colon"):
        forbidden = tuple(
            (before, after)
            for before in tokenizer.encode(":", add_special_tokens=False).ids[-1:]
            for after in tokenizer.encode("\n", add_special_tokens=False).ids[:1]
        )
    return Sampling(
        temperature=members.number("temperature", 1.0, least=0.0, most=100.0),
        # There, neither top_k nor top_p is greedy.
        top_k=top_k if top_k or top_p else 1,
        top_p=top_p or 1.0,
        top_p_decay=decay or 1.0,
        top_p_bound=bound,
        never_after=forbidden,
    )


def _stops(members: Members) -> tuple[str, ...]:
    if members.flag("stop_on_eol"):
        return ("\n",)
    return ("\n\n",) if members.flag("stop_on_double_eol") else ()


def _search(members: Members, prompts: Sequence[str]) -> BeamSearch | None:
    width = members.whole("beam_width", None, least=1, most=64)
    if width is None:
        return None
    if len(prompts) > 1:
        raise ApiError(400, "A beam search takes one prompt.", parameter="beam_width")
    return BeamSearch(
        beams=width, length_penalty=members.number("length_penalty", 1.0, least=-10.0, most=10.0)
    )


def legacy_answer(
    asked: LegacyAsked, pieces: Sequence[Sequence[Piece]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The answer: each prompt with what follows it, its tokens, their log-probabilities."""
    texts, segments, logprobs = [], [], []
    for request, parts in zip(asked.requests, pieces, strict=True):
        tokens = [token for part in parts for token in part.tokens]
        texts.append(tokenizer.decode(list(request.prompt)) + "".join(part.text for part in parts))
        known = [*parts[0].prompt_tokens, *tokens]
        logprobs.append([token.logprob for token in known[1:]])
        ids = [*request.prompt, *(token.id for token in tokens)]
        segments.append([tokenizer.decode([each], skip_special_tokens=False) for each in ids])
    return {
        "text": texts,
        "segments": segments,
        "logprobs": logprobs if asked.wants_logprobs else None,
    }
