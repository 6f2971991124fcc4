"""Names of persons, by Presidio and a spaCy model (extra ``[names]``); nothing is downloaded.

Unlike everything else in this package a model guesses: it misses names and takes other words for
some. What it finds depends on the model and on the text around.
"""

from __future__ import annotations

import importlib
import re
from bisect import bisect
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mds_data.errors import DataError
from mds_data.privacy.findings import Finding

__all__ = ["NameFinder", "name_finder"]

_MOST = 50_000
"""Characters that the model is given at once; spaCy refuses a million."""
_REPLACED = re.compile(r"<[A-Z_]+(?:_[a-p]{20})?>|\*{2,}")
"""What stands where something was replaced before; a model might take it for a name."""


class NameFinder:
    """Finds names.

    Args:
        model: A spaCy model that is installed, or its folder.

    Raises:
        DataError: There is no such model.
        ImportError: Presidio is not installed.
    """

    def __init__(self, model: str) -> None:
        try:
            spacy = importlib.import_module("spacy")
            analyzer = importlib.import_module("presidio_analyzer")
            engines = importlib.import_module("presidio_analyzer.nlp_engine")
        except ImportError:
            raise ImportError(
                "names are found by Presidio: pip install 'mds-data[names]', and a spaCy model"
            ) from None
        # Presidio would download it, which must never happen here.
        if not (spacy.util.is_package(model) or Path(model).is_dir()):
            raise DataError(
                f"the spaCy model {model!r} is not installed, and nothing is downloaded here; "
                f"install it by: python -m spacy download {model}"
            )
        self._language = spacy.load(model, exclude=["parser", "lemmatizer"]).lang
        models = [{"lang_code": self._language, "model_name": model}]
        provider = engines.NlpEngineProvider(
            nlp_configuration={"nlp_engine_name": "spacy", "models": models}
        )
        self._engine = analyzer.AnalyzerEngine(
            nlp_engine=provider.create_engine(), supported_languages=[self._language]
        )

    def __call__(self, text: str) -> list[Finding]:
        """The names in a text, by position."""
        replaced = [match.span() for match in _REPLACED.finditer(text)]
        found = [
            Finding(start + first, start + stop, "NAME")
            for start, piece in _pieces(text)
            for first, stop in self._spans(piece)
        ]
        return sorted(each for each in found if not _touches(each, replaced))

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        results: list[Any] = self._engine.analyze(
            text, language=self._language, entities=["PERSON"]
        )
        for result in results:
            yield result.start, result.end


def _touches(finding: Finding, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a finding shares a character with one of the spans, which are in order."""
    next_one = bisect(spans, (finding.start, finding.end))
    return any(
        start < finding.end and finding.start < stop
        for start, stop in spans[max(0, next_one - 1) : next_one + 1]
    )


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield parts of a text with their places, cut after lines or words where possible."""
    start = 0
    while start < len(text):
        stop = min(start + _MOST, len(text))
        if stop < len(text):
            cut = max(text.rfind("\n", start, stop), 0) or text.rfind(" ", start, stop)
            stop = cut + 1 if cut > start else stop
        yield start, text[start:stop]
        start = stop


@cache
def name_finder(model: str) -> NameFinder:
    """The finder of a model, loaded once in each process."""
    return NameFinder(model)
