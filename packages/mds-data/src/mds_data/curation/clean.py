"""Clean texts: mend broken encodings, keep wanted languages, drop what is too short or repeats."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from mds_data.curation.filters import (
    LengthLimits,
    RepetitionLimits,
    length_fault,
    repetition_faults,
)
from mds_data.curation.language import LanguageGuess
from mds_data.curation.records import CuratedBatch, TextRecord, curate
from mds_data.curation.report import CurationReport
from mds_data.curation.run import CurationConfig, run_filter
from mds_data.preprocess.batches import Batch
from mds_data.preprocess.engine import Engine

__all__ = ["CleanSettings", "clean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanSettings:
    """What is mended and what is removed; each part is off unless asked for."""

    fix_text: bool = False
    """Mend mojibake, HTML entities, odd quotes and control characters by ftfy."""
    languages: frozenset[str] = frozenset()
    """Keep texts in these only; codes such as ``en``. Empty: any."""
    min_probability: float = 0.65
    """How sure the language must be."""
    length: LengthLimits = field(default_factory=LengthLimits)
    repetition: RepetitionLimits | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"the probability ({self.min_probability}) must lie from 0 to 1.")
        limited = any(limit is not None for limit in asdict(self.length).values())
        if not (self.fix_text or self.languages or self.repetition or limited):
            raise ValueError(
                "nothing to do; ask for --fix-text, --languages, --min-words, --repetition, ..."
            )


class _Cleaner:
    """Applies the settings to batches; lives in a worker."""

    def __init__(self, settings: CleanSettings, keys: tuple[str, ...]) -> None:
        self._settings = settings
        self._keys = keys
        self._fix = text_fixer() if settings.fix_text else None
        self._language = LanguageGuess(settings.languages) if settings.languages else None

    def __call__(self, batch: Batch) -> CuratedBatch:
        return curate(batch, self._keys, judge=self._judge)

    def _judge(self, record: TextRecord, result: CuratedBatch) -> tuple[str, str] | list[bytes]:
        texts = {key: record.members[key] for key in self._keys}
        if self._fix is not None:
            texts = {key: self._fix(text) for key, text in texts.items()}
        text = "\n\n".join(texts.values())
        fault = self._fault(text)
        if fault is not None:
            return fault
        line = record.with_texts(texts)
        if line is not record.data:
            result.note("texts mended")
        result.characters_out += len(text)
        return [line]

    def _fault(self, text: str) -> tuple[str, str] | None:
        settings = self._settings
        if not text.strip():
            return "empty", "no text in it"
        length = length_fault(text, settings.length)
        if length is not None:
            return "length", length
        if settings.repetition is not None:
            for fault in repetition_faults(text, settings.repetition):
                return "repetition", fault
        if self._language is not None:
            language, probability = self._language(text)
            if language not in settings.languages:
                return "language", f"{language} ({probability:.2f})"
            if probability < settings.min_probability:
                return "language", f"{language}, but only {probability:.2f} sure"
        return None


def text_fixer() -> Callable[[str], str]:
    """Return ftfy's function.

    Raises:
        ImportError: ftfy is not installed.
    """
    try:
        ftfy = importlib.import_module("ftfy")
    except ImportError:
        raise ImportError("mending texts needs ftfy: pip install 'mds-data[clean]'") from None
    # Line by line, as it does by itself; long lines are cut there, and texts stay texts.
    fix: Callable[[str], str] = partial(ftfy.fix_text, unescape_html="auto", normalization="NFC")
    return fix


def clean(
    config: CurationConfig,
    settings: CleanSettings,
    *,
    engine: Engine | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
) -> CurationReport:
    """Write the texts that stand all tests, mended where asked for.

    Args:
        config: What to read and where to write.
        settings: What is mended and removed.
        engine: Where the work is done.
        on_progress: Called with bytes done, bytes in all and records.
    """
    _Cleaner(settings, config.keys)  # What is missing should show before anything is read.
    return run_filter(
        config,
        command="clean",
        arguments=_shown(settings),
        make=partial(_Cleaner, settings, config.keys),
        engine=engine,
        on_progress=on_progress,
    )


def _shown(settings: CleanSettings) -> dict[str, Any]:
    return asdict(settings) | {"languages": sorted(settings.languages)}
