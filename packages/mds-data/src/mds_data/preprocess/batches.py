"""What travels between the reader, the encoders and the writer: raw records, and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.preprocess.inputs import InputFormat, Record
from mds_data.preprocess.long_record import LONG_RECORD
from mds_data.preprocess.records import Problem
from mds_data.privacy.documents import RedactionTally

__all__ = ["Batch", "EncodedBatch", "EncodedDocuments"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one file that are encoded together."""

    file: str
    format: InputFormat
    records: list[Record]

    @property
    def is_long(self) -> bool:
        """Whether it is one huge record, which is worked on where it was read."""
        return len(self.records) == 1 and len(self.records[0].data) >= LONG_RECORD


@dataclass(frozen=True, slots=True)
class EncodedDocuments:
    """Documents of one key, one after the other."""

    tokens: NDArray[Any]
    """[n] ids of all documents."""
    lengths: NDArray[np.int64]
    """[d] tokens of each, end-of-document token included."""
    sentence_lengths: NDArray[np.int32]
    """[sentences] tokens of each; the document itself is one if sentences are not cut."""
    doc_sentences: NDArray[np.int32]
    """[d] sentences of each document."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[d] value of each document, by column."""
    labels: dict[str, set[str]] = field(default_factory=dict)
    """The texts behind the codes in columns of categories."""


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """What became of a batch: documents by key, and the problems in the order of the lines."""

    documents: dict[str, EncodedDocuments]
    problems: Sequence[Problem]
    redacted: RedactionTally = field(default_factory=RedactionTally)
    """What was replaced in the texts, if it was asked for."""
