"""Turns tokens into text as they come, and finds where it has to stop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["TextStream", "stop_strings"]

_REPLACEMENT = "\ufffd"
_CONTEXT = 6
_LONGEST_CHARACTER = 8
_MOST_STOPS = 64


def stop_strings(given: Sequence[str]) -> tuple[str, ...]:
    """Check strings at which answers are to end.

    Raises:
        ValueError: If one is empty, since every text contains it, or there are too many.
    """
    if any(not text for text in given):
        raise ValueError("A stop string is empty, so every answer would be; leave it out.")
    if len(given) > _MOST_STOPS:
        raise ValueError(f"There are {len(given)} stop strings; give at most {_MOST_STOPS}.")
    return tuple(given)


class TextStream:
    """The text of an answer, growing.

    A character may need several tokens, and a stop string several pieces of text; what may still
    change is held back. The end of the prompt is read along, since some tokenizers write a word's
    space only behind another word.

    Args:
        tokenizer: Of the model.
        prompt: The tokens before the answer.
        stop: The text ends before the first of these.

    Attributes:
        text: What is certain of the answer so far.
        stopped: Whether a stop string has ended it.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt: Sequence[int] = (), stop: tuple[str, ...] = ()
    ) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, stop
        self._tokens = list(prompt[-_CONTEXT:])
        self._start, self._read = 0, len(self._tokens)
        self._held = ""

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now."""
        self._tokens.append(token)
        known = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        unfinished = text.endswith(_REPLACEMENT)
        if unfinished and len(self._tokens) - self._read < _LONGEST_CHARACTER:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return self._take(text[len(known) :])

    def flush(self) -> str:
        """At the end of the answer: return what was held back."""
        if self.stopped:
            return ""
        known = self._decode(self._tokens[self._start : self._read])
        rest = self._decode(self._tokens[self._start :])[len(known) :]
        self._start = self._read = len(self._tokens)
        shown = self._take(rest)
        last, self._held = self._held, ""  # no stop string will come of it any more
        self.text += last
        return shown + last

    def _take(self, fresh: str) -> str:
        """Look for stop strings; hold back what may be the beginning of one."""
        self._held += fresh
        places = [place for text in self._stop if (place := self._held.find(text)) >= 0]
        if places:
            self.stopped = True
            shown, self._held = self._held[: min(places)], ""
        else:
            kept = _beginning_of_any(self._stop, self._held)
            shown = self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
        self.text += shown
        return shown

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def _beginning_of_any(stop: tuple[str, ...], text: str) -> int:
    """Length of the longest end of the text with which a stop string begins."""
    longest = max((len(each) for each in stop), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-size:]) for each in stop):
            return size
    return 0
