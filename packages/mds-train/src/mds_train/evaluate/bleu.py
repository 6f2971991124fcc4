"""BLEU of translations, by sacrebleu, so that it compares with published numbers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mds_train.errors import InputError

__all__ = ["Bleu", "measure_bleu", "read_lines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bleu:
    """A corpus' scores."""

    sentences: int
    bleu: float
    chrf: float
    signature: str
    """How BLEU was computed; publish it with the number."""


def measure_bleu(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    tokenize: Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"] = "13a",
    lowercase: bool = False,
) -> Bleu:
    """Compare translations with one or more references each.

    Args:
        hypotheses: the translations.
        references: one sequence a set of references, each as long as the hypotheses.
        tokenize: sacrebleu's tokenizer: 13a is usual, zh for Chinese.
        lowercase: compare without case.

    Raises:
        InputError: If the numbers of sentences differ, or there are none.
        ImportError: If sacrebleu is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError(
            "BLEU needs sacrebleu: pip install 'mds-train[evaluate]'", name="sacrebleu"
        ) from error
    for number, lines in enumerate(references, start=1):
        if len(lines) != len(hypotheses):
            raise InputError(
                f"There are {len(hypotheses)} translations, but reference {number} has "
                f"{len(lines)} sentences; each line belongs to the line of the same number."
            )
    if not hypotheses:
        raise InputError("There is no translation to measure.")
    bleu = BLEU(tokenize=tokenize, lowercase=lowercase)
    found = bleu.corpus_score(list(hypotheses), [list(lines) for lines in references])
    chrf = CHRF().corpus_score(list(hypotheses), [list(lines) for lines in references])
    return Bleu(
        sentences=len(hypotheses),
        bleu=float(found.score),
        chrf=float(chrf.score),
        signature=str(bleu.get_signature()),
    )


def read_lines(path: Path) -> list[str]:
    """The lines of a text, or the member "text" of each line of a .jsonl file.

    Such files are what ``mds-train generate --output`` writes.

    Raises:
        InputError: If it is not UTF-8, or a line of JSON has no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8; convert it first.") from error
    if lines == [""]:
        return []
    if path.suffix != ".jsonl":
        return [line.removesuffix("\r") for line in lines]
    return [_text(path, number, line) for number, line in enumerate(lines, start=1)]


def _text(path: Path, number: int, line: str) -> str:
    try:
        members = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not JSON; write one object a line.") from error
    text = members.get("text") if isinstance(members, dict) else None
    if not isinstance(text, str):
        raise InputError(f'{path}, line {number}: there is no "text"; write {{"text": "..."}}.')
    return " ".join(text.split())
