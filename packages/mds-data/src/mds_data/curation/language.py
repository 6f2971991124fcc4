"""Which language a text is in, by py3langid (97 languages, 5 MB, nothing to download)."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["LanguageGuess"]

_CHARACTERS = 4000
"""Characters that are looked at: taken from the middle, where a text is least like others."""


class LanguageGuess:
    """Names the language of texts, with a probability.

    Raises:
        ImportError: py3langid is not installed.
        ValueError: It does not know one of the languages.
    """

    def __init__(self, languages: frozenset[str] = frozenset()) -> None:
        try:
            module = importlib.import_module("py3langid.langid")
        except ImportError:
            raise ImportError(
                "telling languages needs py3langid: pip install 'mds-data[clean]'"
            ) from None
        self._identifier: Any = module.LanguageIdentifier.from_model_file(
            module.MODEL_FILE, norm_probs=True
        )
        known = set(self._identifier.labels)
        unknown = sorted(languages - known)
        if unknown:
            raise ValueError(
                f"the language {unknown[0]!r} is not known; the known ones are "
                f"{', '.join(sorted(known))}."
            )

    def __call__(self, text: str) -> tuple[str, float]:
        """Return the code of a text's language, such as ``en``, and its probability."""
        middle = max(0, (len(text) - _CHARACTERS) // 2)
        language, probability = self._identifier.classify(text[middle : middle + _CHARACTERS])
        return str(language), float(probability)
