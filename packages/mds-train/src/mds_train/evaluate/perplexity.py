"""Perplexity of texts, by windows that may overlap; per token, word and byte."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mds_core.models import GPT
from mds_train.errors import InputError
from mds_train.evaluate.scoring import Passage, score

__all__ = ["Perplexity", "measure_perplexity", "read_texts", "windows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """What a model thinks of texts."""

    tokens: int
    """Tokens scored."""
    words: int
    """Words scored, of the text as it was given, split at white space."""
    bytes: int
    """Bytes of the text as it was given, in UTF-8."""
    loss: float
    """Mean over the tokens, in nats."""
    perplexity: float
    word_perplexity: float
    """The one to compare between tokenizers, and with Megatron's "adjusted" one."""
    byte_perplexity: float
    bits_per_byte: float


def windows(tokens: Sequence[int], *, length: int, stride: int) -> Iterator[Passage]:
    """Cut a text so that each token but the first is scored once, with as much before it as fits.

    Args:
        tokens: all of the text.
        length: positions of the model; a window has one token more, the last target.
        stride: tokens that each window after the first scores; the fewer, the more context they
            have and the longer it takes.

    Yields:
        The windows; nothing for a text of one token.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"The stride ({stride}) must lie between 1 and the window ({length}).")
    scored = 1
    while scored < len(tokens):
        stop = min(length + 1 if scored == 1 else scored + stride, len(tokens))
        begin = max(stop - length - 1, 0)
        yield Passage(tokens[begin:stop], scored - begin)
        scored = stop


def measure_perplexity(
    model: GPT,
    texts: Iterable[str],
    *,
    encode: Callable[[str], Sequence[int]],
    length: int,
    stride: int,
    begin: int | None = None,
    clean: Callable[[str], str] | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Measure texts, each by itself.

    Args:
        model: in evaluation mode.
        texts: as they were given; words and bytes are counted there.
        encode: makes tokens of a text.
        length: of a window, as for `windows`.
        stride: as for `windows`.
        begin: a token before each text, so that its first one is scored too. Without it the first
            token and the first word do not count, as in Megatron.
        clean: changes a text before it is encoded, such as `wikitext.detokenize`.
        batch_size: windows that are computed together.

    Raises:
        InputError: If nothing is left to score.
    """
    words = size = 0
    encoded: list[list[int]] = []
    for text in texts:
        words += len(text.split()) - (begin is None)
        size += len(text.encode())
        tokens = list(encode(clean(text) if clean else text))
        encoded.append(tokens if begin is None else [begin, *tokens])
    passages = (
        passage for tokens in encoded for passage in windows(tokens, length=length, stride=stride)
    )
    scores = list(score(model, passages, batch_size=batch_size))
    count = sum(each.count for each in scores)
    if count == 0 or words < 1:
        raise InputError("The text is too short: there is no second token or word to score.")
    total = -math.fsum(each.logprob for each in scores)
    return Perplexity(
        tokens=count,
        words=words,
        bytes=size,
        loss=total / count,
        perplexity=_exp(total / count),
        word_perplexity=_exp(total / words),
        byte_perplexity=_exp(total / size),
        bits_per_byte=total / size / math.log(2),
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def read_texts(path: Path) -> list[str]:
    """A file's text; of a .jsonl file the member "text" (or "page") of each line.

    Raises:
        InputError: If it is not UTF-8, or a line has no such member.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8; convert it first.") from error
    if path.suffix != ".jsonl":
        return [content]
    # Not splitlines(): a text may contain other characters that end a line.
    lines = enumerate(content.split("\n"), start=1)
    return [_member(path, number, line) for number, line in lines if line.strip()]


def _member(path: Path, number: int, line: str) -> str:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON; write one object a line.") from error
    if isinstance(members, dict):
        for name in ("text", "page"):
            if isinstance(members.get(name), str):
                return str(members[name])
    raise InputError(f'{path}, line {number}: there is no "text"; write {{"text": "..."}}.')
