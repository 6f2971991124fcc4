"""From parallel text to a store of pairs, with filters by length and ratio."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from mds_data.paired.drops import Drop
from mds_data.paired.encode import PairEncoder, PairFilter
from mds_data.paired.pairs import (
    PairFormat,
    PairSource,
    source_of_files,
    source_of_two_files,
)
from mds_data.paired.pipeline import PartsConfig, PartsProgress, PartsReport, write_parts
from mds_data.privacy.documents import DocumentRedactor
from mds_data.store.schema import token_dtype
from mds_data.tokenizers import Tokenizer

__all__ = ["NMTConfig", "preprocess_nmt"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NMTConfig:
    """What to read and which pairs to keep."""

    writing: PartsConfig
    source: Path | None = None
    """File of source lines; its partner is ``target``."""
    target: Path | None = None
    inputs: tuple[str, ...] = ()
    """Instead of two files: TSV or JSON lines that hold both sides."""
    input_format: PairFormat | None = None
    keys: tuple[str, str] = ("source", "target")
    """JSON members of the two sides; a path such as ``translation.en`` goes into objects."""
    filter: PairFilter = field(default_factory=PairFilter)

    def __post_init__(self) -> None:
        two = self.source is not None and self.target is not None
        if (self.source is None) != (self.target is None) or two == bool(self.inputs):
            raise ValueError(
                "give either two files by --source and --target, or files of pairs by --input."
            )


def preprocess_nmt(
    config: NMTConfig,
    *,
    on_progress: Callable[[PartsProgress], None] | None = None,
    on_drops: Callable[[Sequence[Drop]], None] | None = None,
) -> PartsReport:
    """Tokenise parallel text into a store of pairs: each document has two parts, source and target.

    Args:
        config: What to do.
        on_progress: Called after each batch.
        on_drops: Called with what each batch dropped, in the order of the input.

    Raises:
        InputError: The files have unlike numbers of lines, a line is broken, or nothing is left.
        StoreError: The output exists.
    """
    source, format = _open(config)
    return write_parts(
        source,
        config=config.writing,
        make=partial(_make, format, config.keys, config.filter),
        name="preprocess-nmt",
        arguments={"format": format or "two files", **asdict(config.filter)},
        on_progress=on_progress,
        on_drops=on_drops,
    )


def _open(config: NMTConfig) -> tuple[PairSource, PairFormat | None]:
    if config.source is not None and config.target is not None:
        return source_of_two_files(config.source, config.target), None
    return source_of_files(config.inputs, format=config.input_format)


def _make(
    format: PairFormat | None,
    keys: tuple[str, str],
    filter: PairFilter,
    tokenizer: Tokenizer,
    redactor: DocumentRedactor | None,
) -> PairEncoder:
    return PairEncoder(
        tokenizer,
        format=format,
        keys=keys,
        filter=filter,
        dtype=token_dtype(tokenizer.vocab_size),
        redactor=redactor,
    )
