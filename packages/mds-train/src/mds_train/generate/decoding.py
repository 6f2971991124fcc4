"""Continues batches of prompts, given as tokens or as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

from mds_core.models import GPT
from mds_train.generate.batch import ContinuousBatch
from mds_train.generate.beams import BeamSearch, beam_search
from mds_train.generate.request import FinishReason, Request, Running, Token, check_length
from mds_train.generate.sampling import Sampling
from mds_train.generate.text import TextStream, stop_strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Completion", "complete", "generate", "search_beams"]


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 1234,
    end_token: int | None = None,
) -> list[list[int]]:
    """Continue prompts, which may have different lengths, all at once.

    Args:
        model: the model, in evaluation mode.
        prompts: token ids of each prompt, at least one each.
        max_new_tokens: the most tokens that each prompt gets.
        sampling: how tokens are chosen; greedy when left out.
        seed: makes the choice repeatable; prompt ``i`` draws with ``seed + i``.
        end_token: a sequence ends when this token is chosen; it is not part of the answer.

    Returns:
        The new tokens of each prompt.

    Raises:
        ValueError: If a prompt is empty or the model has not enough positions.
    """
    if not prompts:
        raise ValueError("There is no prompt; give at least one.")
    requests = [
        Request(
            prompt=tuple(prompt),
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(temperature=0.0),
            seed=seed + number,
            end_tokens=frozenset() if end_token is None else frozenset({end_token}),
        )
        for number, prompt in enumerate(prompts)
    ]
    for request in requests:
        check_length(model.config, prompt=request.prompt, max_new_tokens=max_new_tokens)
    longest = max(len(request.prompt) for request in requests) + max_new_tokens
    batch = ContinuousBatch(model, slots=len(requests), max_length=longest)
    runs = [batch.add(request) for request in requests]
    while batch.active or batch.waiting:
        batch.step()
    return [run.answer for run in runs]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An answer to a prompt."""

    text: str
    """What follows the prompt, up to an end token or stop string."""
    tokens: tuple[Token, ...]
    """With their likelihoods, if they were asked for; a stop string's are among them."""
    finish_reason: FinishReason
    score: float | None = None
    """Of a beam search."""


def complete(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Iterable[Sequence[int]],
    *,
    request: Request,
    samples: int = 1,
    stop: Sequence[str] = (),
    slots: int = 8,
    max_length: int,
) -> Iterator[list[Completion]]:
    """Continue any number of prompts, some at a time, and give the answers in their order.

    Args:
        model: in evaluation mode.
        tokenizer: of the model.
        prompts: token ids of each; they are read as slots become free.
        request: what is asked for each; its prompt is replaced, and sample ``j`` of prompt ``i``
            draws with its seed plus ``i * samples + j``.
        samples: answers to each prompt.
        stop: an answer ends before the first of these strings.
        slots: sequences at a time.
        max_length: the most tokens of a sequence, prompt included.

    Yields:
        The ``samples`` answers to each prompt.

    Raises:
        ValueError: If a prompt is empty or there are not enough positions.
    """
    batch = ContinuousBatch(model, slots=slots, max_length=max_length)
    stops, coming = stop_strings(stop), enumerate(prompts)
    going: deque[list[_Answer]] = deque()
    while True:
        while batch.waiting == 0:
            fresh = next(coming, None)
            if fresh is None:
                break
            number, prompt = fresh
            seeds = range(request.seed + number * samples, request.seed + (number + 1) * samples)
            asked = [replace(request, prompt=tuple(prompt), seed=seed) for seed in seeds]
            going.append([_Answer(batch.add(each), tokenizer, stops) for each in asked])
        while going and all(answer.done for answer in going[0]):
            yield [answer.completion() for answer in going.popleft()]
        if not going:
            return
        batch.step()
        for answer in (each for group in going for each in group):
            if answer.read():
                batch.end(answer.running, "stop")


class _Answer:
    """A running sequence and its text."""

    def __init__(self, running: Running, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.running = running
        self._stream = TextStream(tokenizer, prompt=running.request.prompt, stop=stop)
        self._seen = 0

    @property
    def done(self) -> bool:
        return self.running.finish_reason is not None

    def read(self) -> bool:
        """Take the new tokens; return whether a stop string ends the answer now."""
        fresh = self.running.tokens[self._seen :]
        self._seen += len(fresh)
        for token in fresh:
            self._stream.push(token.id)
        return bool(fresh) and self._stream.stopped

    def completion(self) -> Completion:
        self._stream.flush()
        reason = self.running.finish_reason or "length"
        return Completion(
            text=self._stream.text,
            tokens=tuple(self.running.tokens),
            finish_reason="stop" if self._stream.stopped else reason,
        )


def search_beams(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Iterable[Sequence[int]],
    *,
    search: BeamSearch,
    max_new_tokens: int,
    end_tokens: frozenset[int] = frozenset(),
    samples: int = 1,
) -> Iterator[list[Completion]]:
    """As `complete`, by beam search: the best ``samples`` answers to each prompt, best first."""
    for prompt in prompts:
        beams = beam_search(
            model, prompt, max_new_tokens=max_new_tokens, search=search, end_tokens=end_tokens
        )
        answers = []
        for beam in islice(beams, samples):
            stream = TextStream(tokenizer, prompt=prompt)
            for token in beam.tokens:
                stream.push(token)
            stream.flush()
            answers.append(
                Completion(
                    text=stream.text,
                    tokens=tuple(Token(id=token) for token in beam.tokens),
                    finish_reason="stop" if beam.ended else "length",
                    score=beam.score,
                )
            )
        yield answers
