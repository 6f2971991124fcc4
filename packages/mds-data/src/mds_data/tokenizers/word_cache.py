"""Encode byte-level BPE by a table of words: the ids of the library in half its time or less.

BPE merges inside a word only, and words repeat. So the text is cut into words by Python's regular
expressions (several times faster than the library's), and each different word is encoded once. The
two engines call the same characters letters, digits and spaces for most scripts; a text with any
other character goes to the library whole.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

__all__ = ["SAFE", "WordCache", "word_cache_for"]

SAFE = (
    "\\x00-\\x1b\\x20-\\xb1\\xb4-\\xb8\\xba\\xbb\\xbf-\\u017e\\u0180-\\u036f\\u0386\\u0388-\\u038a"
    "\\u038e-\\u03a1\\u03a3-\\u052f\\u05d0-\\u05ea\\u0621-\\u064a\\u0660-\\u0669\\u0904-\\u0939"
    "\\u0966-\\u096f\\u2010-\\u2027\\u2030-\\u205e\\u20a0-\\u20bf\\u2190-\\u22ff\\u2500-\\u26ff"
    "\\u3000-\\u3003\\u3008-\\u3011\\u3041-\\u3096\\u30a1-\\u30fe\\u4e00-\\u9fa5\\uac00-\\ud7a3"
    "\\uff01-\\uff5e\\U0001f300-\\U0001f64f"
)
"""Characters that Python and the library class alike; numbers such as ½, ² and Ⅷ are not here."""

_ODD = re.compile(f"[^{SAFE}]")
_ODD_ASCII = re.compile("[\\x1c-\\x1f]")
_MOST_WORDS = 2**17
_MOST_CHARACTERS = 2**22

# The library's pattern (\p{L} letters, \p{N} digits) and the same one for Python.
_LETTER, _DIGIT, _SIGN = r"[^\W\d_]", r"\d", r"(?:[^\s\w]|_)"
_ASCII = {
    _LETTER: "[A-Za-z]",
    _DIGIT: "[0-9]",
    _SIGN: r"[^\sA-Za-z0-9]",
    r"(?:[^\r\n\w]|_)": r"[^\r\nA-Za-z0-9]",
}
"""The same classes where a text is ASCII: a set of characters is found faster than a kind."""
_PATTERNS = {
    # GPT-2, and what ByteLevel uses by itself.
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": (
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_DIGIT}+| ?{_SIGN}+|\s+(?!\S)|\s+"
    ),
    # GPT-4, Llama 3.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?{_LETTER}+|{_DIGIT}{{1,3}}"
        rf"| ?{_SIGN}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    # Qwen 2.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|(?:[^\r\n\w]|_)?{_LETTER}+|{_DIGIT}"
        rf"| ?{_SIGN}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_BYTE_LEVEL = next(iter(_PATTERNS.values()))
_TRIAL = "It's  a\n\ntrial,\tof 12345 words_and-signs: naïve 中文 l\u2019eau 🙂!!\r\n  x   "


class WordCache:
    """Ids by word, learnt as words are met, forgotten when they become too many.

    Args:
        backend: The library's tokenizer, set to take special tokens in texts as text.
        pattern: What a word is.
        composed: The tokenizer composes characters (NFC), so only composed texts can be taken.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, pattern: str, composed: bool) -> None:
        self._backend = backend
        self._words = re.compile(pattern).findall
        self._ascii_words = re.compile(_for_ascii(pattern), re.ASCII).findall
        self._composed = composed
        self._model = backend.model
        self._letters = _byte_letters()
        self._ids: dict[str, bytes] = {}
        self._characters = 0

    def words(self, text: str) -> list[str]:
        """Return the words that a text is cut into; together they are the text."""
        found: list[str] = (self._ascii_words if text.isascii() else self._words)(text)
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, the same as the library's."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Return the same as arrays, which is how the table has them."""
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> NDArray[np.int32]:
        if not self._is_safe(text):
            return self._by_library(text)
        words = self.words(text)
        try:
            return self._looked_up(words)
        except KeyError:
            self._learn(words)
            return self._looked_up(words)

    def _is_safe(self, text: str) -> bool:
        if (_ODD_ASCII if text.isascii() else _ODD).search(text) is not None:
            return False
        return not self._composed or unicodedata.is_normalized("NFC", text)

    def _looked_up(self, words: list[str]) -> NDArray[np.int32]:
        return np.frombuffer(b"".join(map(self._ids.__getitem__, words)), np.int32)

    def _learn(self, words: Iterable[str]) -> None:
        if len(self._ids) > _MOST_WORDS or self._characters > _MOST_CHARACTERS:
            self._ids.clear()
            self._characters = 0
        fresh = list(set(words).difference(self._ids))
        self._ids.update(zip(fresh, map(self._merged, fresh), strict=True))
        self._characters += sum(map(len, fresh))

    def _merged(self, word: str) -> bytes:
        """Return the ids of one word; to ask the model alone takes half as long as the chain."""
        letters = word.encode("utf-8").decode("latin-1").translate(self._letters)
        return array("i", [token.id for token in self._model.tokenize(letters)]).tobytes()

    def _by_library(self, text: str) -> NDArray[np.int32]:
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encodings[0].ids, np.int32)


def _for_ascii(pattern: str) -> str:
    for wide, narrow in _ASCII.items():
        pattern = pattern.replace(wide, narrow)
    return pattern


def _byte_letters() -> dict[int, str]:
    """GPT-2's table: the letter by which byte-level models spell each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    shown = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return {byte: shown.get(byte, chr(byte)) for byte in range(256)}


def word_cache_for(
    description: Mapping[str, Any], *, backend: tokenizers.Tokenizer
) -> WordCache | None:
    """Return a word cache for a tokenizer whose words are known here, else None.

    Args:
        description: The tokenizer's JSON.
        backend: The tokenizer, set to take special tokens in texts as text.
    """
    pattern = _known_pattern(description.get("pre_tokenizer"))
    normalizer = description.get("normalizer")
    added = description.get("added_tokens") or ()
    if (
        pattern is None
        or (description.get("model") or {}).get("type") != "BPE"
        or normalizer not in (None, {"type": "NFC"})
        or not all(token.get("special") for token in added)
    ):
        return None
    cache = WordCache(backend, pattern=pattern, composed=normalizer is not None)
    # Should a version of the library cut words otherwise, it is asked about every text.
    pieces = backend.pre_tokenizer.pre_tokenize_str(_TRIAL)
    expected = [_TRIAL[start:stop] for _, (start, stop) in pieces]
    return cache if cache.words(_TRIAL) == expected else None


def _known_pattern(pre_tokenizer: object) -> str | None:
    if not isinstance(pre_tokenizer, dict):
        return None
    if _is_byte_level(pre_tokenizer, use_regex=True):
        return _BYTE_LEVEL
    steps: Sequence[Mapping[str, Any]] = pre_tokenizer.get("pretokenizers") or ()
    if len(steps) != 2 or not _is_byte_level(steps[1], use_regex=False):
        return None
    split = {key: steps[0].get(key) for key in ("type", "behavior", "invert")}
    if split != {"type": "Split", "behavior": "Isolated", "invert": False}:
        return None
    return _PATTERNS.get(str((steps[0].get("pattern") or {}).get("Regex")))


def _is_byte_level(step: Mapping[str, Any], *, use_regex: bool) -> bool:
    return (
        step.get("type") == "ByteLevel"
        and step.get("use_regex", True) is use_regex
        and step.get("add_prefix_space") is False
    )
