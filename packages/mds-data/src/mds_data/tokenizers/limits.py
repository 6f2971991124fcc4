"""Refuse tokenizer files that would run for ever or fill memory, before a library reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mds_data.tokenizers.protocol import TokenizerError

__all__ = ["check_growth", "check_ids", "check_json_tokenizer", "is_panic"]

_GAP = 2**16
_MOST_GROWTH = 2**12
"""Characters that a normalizer may make of one."""
_DEEPEST = 20


def is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of a Rust library, which Python's `Exception` leaves out."""
    return type(error).__name__ == "PanicException"


def check_json_tokenizer(description: Mapping[str, Any], *, path: Path) -> None:
    """Refuse a ``tokenizer.json`` whose ids or normalizers have no measure.

    Raises:
        TokenizerError: It is so.
    """
    model = description.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    _check_unique(ids, path=path)
    added = description.get("added_tokens")
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
    size = len(vocabulary) if isinstance(vocabulary, (dict, list)) else 0
    check_ids(ids, count=max(size, len(ids)), path=path)
    check_growth(description.get("normalizer"), path=path)


def _check_unique(ids: list[object], *, path: Path) -> None:
    numbers = [each for each in ids if type(each) is int]
    if len(set(numbers)) < len(numbers):
        twice = next(number for number, count in Counter(numbers).items() if count > 1)
        raise TokenizerError(
            f"{path} gives the id {twice} to several tokens, so ids could not be turned back into "
            f"text. Give each token an id of its own."
        )


def check_ids(ids: Iterable[object], *, count: int, path: Path) -> None:
    """Refuse ids far beyond the number of tokens: each would be a row of the embedding."""
    largest = max((each for each in ids if type(each) is int), default=0)
    if largest > 4 * count + _GAP:
        raise TokenizerError(
            f"{path} has {count:,} tokens and the id {largest:,}; a model would need a row for "
            f"each number up to it. Give the tokens ids without such gaps."
        )


def check_growth(normalizer: object, *, path: Path) -> None:
    """Refuse normalizers that, one after the other, make thousands of characters of one."""
    growth = _growth(normalizer, depth=0)
    if growth > _MOST_GROWTH:
        raise TokenizerError(
            f"{path} has normalizers that make up to {growth:,.0f} characters of one, which no "
            f"text would survive. Take a tokenizer without them."
        )


def _growth(normalizer: object, *, depth: int) -> float:
    if not isinstance(normalizer, dict):
        return 1.0
    if depth > _DEEPEST:
        return float("inf")
    kind = normalizer.get("type")
    if kind == "Sequence":
        product = 1.0
        inner = normalizer.get("normalizers")
        for each in inner if isinstance(inner, list) else ():
            product = min(product * _growth(each, depth=depth + 1), 1e300)
        return product
    if kind != "Replace":
        return 1.0
    content = normalizer.get("content")
    pattern = normalizer.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    matched = len(text) if isinstance(text, str) and text else 1
    return max(1.0, len(content) / matched) if isinstance(content, str) else 1.0
