"""Choose what BERT and T5 must predict: n-grams of whole words, drawn exactly as the original does.

Draws come in the original's order from the sample's RandomState; only its detours are left out
(lists of lists are shuffled as numbers, and `choice` is the one uniform number it draws).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

__all__ = ["MaskedTokens", "MaskingStyle", "bert_replacement", "mask_tokens", "word_groups"]

Replacement = Callable[[int, np.random.RandomState], int]
"""Gives the id that stands in for a masked one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskingStyle:
    """How many tokens are masked, and in what pieces."""

    probability: float = 0.15
    """Share of the tokens that are predicted."""
    longest: int = 3
    """Words of the longest n-gram."""
    whole_words: bool = True
    """Mask all tokens of a word or none."""
    favor_longer: bool = False
    """Prefer long n-grams to short ones."""
    geometric: bool = False
    """Lengths from a geometric distribution (SpanBERT's 0.2), as for T5."""

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ValueError(f"mask probability ({self.probability}) must lie from 0 to 1")
        if self.longest < 1:
            raise ValueError(f"the longest n-gram ({self.longest}) must have at least one word")


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The result: what is read, and what is to be predicted where."""

    tokens: list[int]
    positions: list[int]
    """Ascending."""
    labels: list[int]
    spans: list[list[int]]
    """Positions of each masked n-gram, in order of the text."""


def word_groups(
    tokens: Sequence[int],
    *,
    marks: frozenset[int],
    continues_word: NDArray[np.bool_] | None,
) -> list[list[int]]:
    """Positions of each word; marks such as ``[CLS]`` belong to none."""
    groups: list[list[int]] = []
    inside = [False] * len(tokens) if continues_word is None else continues_word[tokens].tolist()
    for place, (token, goes_on) in enumerate(zip(tokens, inside, strict=True)):
        if token in marks:
            continue
        if goes_on and groups:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def mask_tokens(
    tokens: list[int],
    groups: list[list[int]],
    *,
    style: MaskingStyle,
    most: float,
    replace: Replacement,
    random: np.random.RandomState,
) -> MaskedTokens:
    """Mask about ``style.probability`` of the tokens, ``most`` at most.

    Args:
        tokens: The ids of a sample.
        groups: Positions of each word in it.
        style: How many, and in what pieces.
        most: Tokens that are predicted at most; need not be whole.
        replace: What stands in for a masked id.
        random: The sample's random numbers.
    """
    if style.probability == 0:
        return MaskedTokens(list(tokens), [], [], [])
    wanted = min(most, max(1, round(len(tokens) * style.probability)))
    draw = _length_drawer(style, random)
    order = list(range(len(groups)))
    random.shuffle(order)
    output = list(tokens)
    covered: set[int] = set()
    spans: list[list[int]] = []
    for first in order:
        if len(covered) >= wanted:
            break
        span = _fitting(groups, first, length=draw(), room=wanted - len(covered))
        if span is None or not covered.isdisjoint(span):
            continue
        covered.update(span)
        for place in span:
            output[place] = replace(tokens[place], random)
        spans.append(span)
    positions = sorted(covered)
    spans.sort(key=lambda span: span[0])
    return MaskedTokens(output, positions, [tokens[place] for place in positions], spans)


def _fitting(groups: list[list[int]], first: int, *, length: int, room: float) -> list[int] | None:
    """Positions of up to ``length`` words from ``first`` on, as many as fit; None if none does."""
    for words in range(length, 0, -1):
        span = list(chain.from_iterable(groups[first : first + words]))
        if len(span) <= room:
            return span
    return None


def _length_drawer(style: MaskingStyle, random: np.random.RandomState) -> Callable[[], int]:
    if style.geometric:
        return lambda: min(int(random.geometric(0.2)), style.longest)
    shares = 1.0 / np.arange(1, style.longest + 1)
    shares /= shares.sum(keepdims=True)
    shares = shares[::-1] if style.favor_longer else shares
    borders = (shares / shares.sum(keepdims=True)).cumsum()
    borders /= borders[-1]
    return lambda: int(borders.searchsorted(random.random_sample(), side="right")) + 1


def bert_replacement(*, mask_id: int, used_ids: NDArray[np.int64]) -> Replacement:
    """Of ten masked tokens eight become the mask, one stays, one is any token."""

    def replace(token: int, random: np.random.RandomState) -> int:
        if random.random_sample() < 0.8:
            return mask_id
        if random.random_sample() < 0.5:
            return token
        return int(used_ids[random.randint(0, len(used_ids))])

    return replace
