"""Fill in the middle: a part of a document is moved to its end, so that a decoder learns to infill.

The rearranged document keeps its length: three marks take the place of its last three tokens.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mds_data.tokenizers.vocabulary import Vocabulary

__all__ = ["FillInTheMiddle"]

_SPELLINGS = ("<|fim_{}|>", "<fim_{}>", "<fim-{}>", "<|fim_{}_token|>")
_SHORTEST = 10
"""Tokens; shorter documents stay as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FillInTheMiddle:
    """How often documents are rearranged, and by which marks."""

    prefix_id: int
    middle_id: int
    suffix_id: int
    rate: float = 0.5
    """Share of the documents that are rearranged."""
    spm_rate: float = 0.5
    """Share of those in which the suffix comes first (SPM), not the prefix (PSM)."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must lie from 0 to 1")

    @classmethod
    def of_vocabulary(
        cls, vocabulary: Vocabulary, *, rate: float = 0.5, spm_rate: float = 0.5
    ) -> Self:
        """With the marks of a code model's vocabulary, such as ``<fim_prefix>``.

        Raises:
            ValueError: The vocabulary has no such marks.
        """
        for spelling in _SPELLINGS:
            names = (spelling.format(part) for part in ("prefix", "middle", "suffix"))
            prefix, middle, suffix = map(vocabulary.id_of_piece, names)
            if prefix is not None and middle is not None and suffix is not None:
                return cls(
                    prefix_id=prefix,
                    middle_id=middle,
                    suffix_id=suffix,
                    rate=rate,
                    spm_rate=spm_rate,
                )
        raise ValueError(
            f"{vocabulary.name} has no marks such as <fim_prefix> <fim_middle> <fim_suffix>; "
            f"give their ids"
        )

    def rearranged(
        self, ids: NDArray[Any], *, eod_id: int | None, random: np.random.Generator
    ) -> NDArray[np.int64]:
        """[n] the ids with some of their documents rearranged; ends of documents stay in place.

        Args:
            ids: [n] ids of a sample.
            eod_id: What ends a document; all is one document if None.
            random: The sample's random numbers.
        """
        result = ids.astype(np.int64)
        ends = np.empty(0, np.int64) if eod_id is None else np.flatnonzero(result == eod_id)
        start = 0
        for end in [*ends.tolist(), len(result)]:
            if end - start >= _SHORTEST and random.random() < self.rate:
                result[start:end] = self._moved(result[start : end - 3], random)
            start = end + 1
        return result

    def _moved(self, ids: NDArray[np.int64], random: np.random.Generator) -> NDArray[np.int64]:
        """[n + 3] prefix, middle and suffix in another order, with their marks."""
        first, second = sorted(random.integers(0, len(ids) + 1, 2).tolist())
        prefix, middle, suffix = ids[:first], ids[first:second], ids[second:]
        marks = np.array([self.prefix_id, self.suffix_id, self.middle_id])
        before, between, last = marks[:1], marks[1:2], marks[2:]
        if random.random() < self.spm_rate:
            return np.concatenate([before, between, suffix, last, prefix, middle])
        return np.concatenate([before, prefix, between, suffix, last, middle])
