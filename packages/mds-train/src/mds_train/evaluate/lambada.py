"""LAMBADA: does the model know the last word of a passage?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mds_core.models import GPT
from mds_train.errors import InputError
from mds_train.evaluate.scoring import Passage, score

__all__ = ["Lambada", "last_token", "last_word", "measure_lambada"]

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lambada:
    """What came of it."""

    passages: int
    correct: int
    accuracy: float
    """Share of the passages whose target greedy decoding gives, whole."""
    perplexity: float
    """Of the targets: exp of their mean loss, a target being one event."""


def last_word(text: str, encode: Encode) -> Passage:
    """The strict way: all tokens of the last word are to be found."""
    before, _, word = text.rstrip().rpartition(" ")
    context = list(encode(before.rstrip()))
    return Passage([*context, *encode(" " + word)], len(context))


def last_token(text: str, encode: Encode) -> Passage:
    """The loose way: the last token is, whatever part of a word it is."""
    tokens = list(encode(text))
    return Passage(tokens, len(tokens) - 1)


def measure_lambada(
    model: GPT,
    texts: Iterable[str],
    *,
    encode: Encode,
    strict: bool,
    length: int,
    batch_size: int = 8,
) -> Lambada:
    """Measure passages.

    Args:
        model: in evaluation mode.
        texts: the passages, each with its last word.
        encode: makes tokens of a text.
        strict: `last_word` or else `last_token`.
        length: positions of the model; what a longer passage has in front is cut off.
        batch_size: passages that are computed together.

    Raises:
        InputError: If there is no passage, or one has a single word or token.
    """
    split = last_word if strict else last_token
    passages = []
    for number, text in enumerate(texts, start=1):
        passage = split(text, encode)
        if passage.start < 1 or passage.start >= len(passage.tokens):
            raise InputError(f"Passage {number} has nothing before its last word: {text[:40]!r}.")
        passages.append(_cut(passage, length))
    if not passages:
        raise InputError("There is no passage to measure.")
    scores = list(score(model, passages, batch_size=batch_size))
    correct = sum(each.is_greedy for each in scores)
    loss = -math.fsum(each.logprob for each in scores) / len(scores)
    return Lambada(
        passages=len(scores),
        correct=correct,
        accuracy=correct / len(scores),
        perplexity=math.exp(loss) if loss < 700 else math.inf,
    )


def _cut(passage: Passage, length: int) -> Passage:
    excess = max(len(passage.tokens) - length - 1, 0)
    return Passage(passage.tokens[excess:], max(passage.start - excess, 1))
