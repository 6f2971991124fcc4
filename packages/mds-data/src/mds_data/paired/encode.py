"""Turn pairs of texts into pairs of id rows, and drop what the filters forbid, as whole pairs.

Runs in worker processes; touches no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.paired.drops import Drop, DropKind
from mds_data.paired.pairs import PairFormat, RawPair, split_line, text_of
from mds_data.preprocess.records import RecordError
from mds_data.privacy.documents import DocumentRedactor, RedactionTally
from mds_data.tokenizers.protocol import Tokenizer

__all__ = [
    "EncodedParts",
    "PairEncoder",
    "PairFilter",
    "encode_texts",
    "pack_parts",
    "without_values",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFilter:
    """Which pairs are kept. Lengths are in tokens."""

    min_length: int = 1
    max_length: int | None = None
    max_ratio: float | None = None
    """Tokens of the longer side over those of the shorter."""

    def __post_init__(self) -> None:
        if self.min_length < 1:
            raise ValueError(f"min_length ({self.min_length}) must be at least 1.")
        if self.max_length is not None and self.max_length < self.min_length:
            raise ValueError(
                f"max_length ({self.max_length}) must not be below min_length ({self.min_length})."
            )
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise ValueError(f"max_ratio ({self.max_ratio}) must be at least 1.")

    def verdict(self, source: int, target: int) -> tuple[DropKind, str] | None:
        """Why a pair of ``source`` and ``target`` tokens goes; None if it stays."""
        shorter, longer = sorted((source, target))
        if shorter < self.min_length:
            return "short", f"{shorter} tokens on one side, fewer than {self.min_length}"
        if self.max_length is not None and longer > self.max_length:
            return "long", f"{longer:,} tokens on one side, more than {self.max_length:,}"
        if self.max_ratio is not None and longer > self.max_ratio * shorter:
            return "ratio", f"{source} against {target} tokens, beyond the ratio {self.max_ratio:g}"
        return None


@dataclass(frozen=True, slots=True)
class EncodedParts:
    """Documents made of parts, one after the other, and what was dropped."""

    tokens: NDArray[Any]
    """[n] ids of all documents."""
    part_lengths: NDArray[np.int32]
    """[parts] tokens of each part."""
    doc_parts: NDArray[np.int32]
    """[d] parts of each document."""
    drops: Sequence[Drop] = field(default_factory=tuple)
    redacted: RedactionTally = field(default_factory=RedactionTally)
    """What was replaced in the texts, if it was asked for."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[d] tokens of each document."""
        ends = np.concatenate([[0], np.cumsum(self.part_lengths, dtype=np.int64)])
        borders = np.concatenate([[0], np.cumsum(self.doc_parts, dtype=np.int64)])
        lengths: NDArray[np.int64] = np.diff(ends[borders])
        return lengths


def pack_parts(
    documents: Sequence[Sequence[Sequence[int]]], *, dtype: np.dtype[Any], drops: Sequence[Drop]
) -> EncodedParts:
    """Join documents, each a list of parts, each a list of ids."""
    ids = [token for parts in documents for part in parts for token in part]
    return EncodedParts(
        tokens=np.asarray(ids, dtype),
        part_lengths=np.asarray([len(part) for parts in documents for part in parts], np.int32),
        doc_parts=np.asarray([len(parts) for parts in documents], np.int32),
        drops=drops,
    )


class PairEncoder:
    """Encodes batches of raw pairs with one tokenizer for both languages."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        format: PairFormat | None,
        keys: tuple[str, str],
        filter: PairFilter,
        dtype: np.dtype[Any],
        redactor: DocumentRedactor | None = None,
    ) -> None:
        """Encode; ``format`` is None where the two sides come from two files."""
        self._redactor = redactor
        self._tokenizer = tokenizer
        self._format = format
        self._keys = keys
        self._filter = filter
        self._dtype = dtype

    def __call__(self, batch: Sequence[RawPair]) -> EncodedParts:
        """Encode one batch."""
        drops: list[Drop] = []
        pairs: list[tuple[RawPair, str, str]] = []
        for raw in batch:
            try:
                source, target = self._texts(raw)
            except RecordError as error:
                drops.append(Drop(raw.file, raw.line, "broken", str(error)))
                continue
            if not source.strip() or not target.strip():
                side = "both sides are" if not (source + target).strip() else "one side is"
                drops.append(Drop(raw.file, raw.line, "empty", f"{side} empty"))
                continue
            pairs.append((raw, source, target))
        texts = [text for _, source, target in pairs for text in (source, target)]
        ids = encode_texts(self._tokenizer, texts)
        documents = []
        for (raw, _, _), source_ids, target_ids in zip(pairs, ids[::2], ids[1::2], strict=True):
            document = self._judged(raw, source_ids, target_ids, drops=drops)
            if document is not None:
                documents.append(document)
        drops.sort(key=lambda drop: drop.line)
        packed = pack_parts(documents, dtype=self._dtype, drops=drops)
        return packed if self._redactor is None else without_values(packed, self._redactor)

    def _texts(self, raw: RawPair) -> tuple[str, str]:
        source, target = self._raw_texts(raw)
        if self._redactor is None:
            return source, target
        source, target = self._redactor.texts([source, target])
        return source, target

    def _raw_texts(self, raw: RawPair) -> tuple[str, str]:
        if raw.target is not None:
            return text_of(raw.source), text_of(raw.target)
        if not raw.source.strip():
            return "", ""
        return split_line(raw.source, format=self._format or "tsv", keys=self._keys)

    def _judged(
        self, raw: RawPair, source: list[int] | str, target: list[int] | str, *, drops: list[Drop]
    ) -> list[list[int]] | None:
        refusal = source if isinstance(source, str) else target
        if isinstance(source, str) or isinstance(target, str):
            drops.append(Drop(raw.file, raw.line, "broken", str(refusal)))
            return None
        reason = self._filter.verdict(len(source), len(target))
        if reason is not None:
            drops.append(Drop(raw.file, raw.line, *reason))
            return None
        return [source, target]


def without_values(parts: EncodedParts, redactor: DocumentRedactor) -> EncodedParts:
    """Return parts with their tally, and drops that show nothing of what was replaced."""
    drops = [replace(each, detail=redactor.unseen(each.detail)) for each in parts.drops]
    return replace(parts, drops=drops, redacted=redactor.take_tally())


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Sequence[list[int] | str]:
    """The ids of each text, or the reason why there are none."""
    try:
        return tokenizer.encode_batch(texts)
    except ValueError:
        return [_encode_one(tokenizer, text) for text in texts]  # one of them is to blame


def _encode_one(tokenizer: Tokenizer, text: str) -> list[int] | str:
    try:
        return tokenizer.encode_batch([text])[0]
    except ValueError as error:
        return str(error)
