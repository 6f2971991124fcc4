"""Measures of difficulty. A measure maps the ids of one sample to a number; larger is harder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.errors import DataError

__all__ = ["BUILT_IN", "Metric", "Rarity", "length", "metric_named"]

Metric = Callable[[NDArray[Any]], float]

BUILT_IN = ("length", "vocabulary-rarity", "mean-rarity")


def length(ids: NDArray[Any]) -> float:
    """Number of tokens."""
    return float(len(ids))


@dataclass(frozen=True, slots=True)
class Rarity:
    """How unlikely the tokens are by themselves: the sum or the mean of ``-log(frequency)``."""

    surprise: NDArray[np.float64]
    """[vocab_size] ``-log`` of each token's share of the corpus."""
    mean: bool = False

    @classmethod
    def of_counts(cls, counts: NDArray[np.int64], *, mean: bool = False) -> Rarity:
        """From how often each token stands in the corpus; one that never does counts once."""
        total = max(int(counts.sum()), 1)
        return cls(-np.log(np.maximum(counts, 1) / total), mean)

    def __call__(self, ids: NDArray[Any]) -> float:
        """The rarity of one sample."""
        if not len(ids):
            return 0.0
        values = self.surprise[ids]
        return float(values.mean() if self.mean else values.sum())


def metric_named(name: str, *, counts: NDArray[np.int64] | None) -> Metric:
    """A built-in measure, or ``module:function``, which is imported.

    Raises:
        DataError: There is no such measure.
    """
    if name == "length":
        return length
    if name in ("vocabulary-rarity", "mean-rarity") and counts is not None:
        return Rarity.of_counts(counts, mean=name == "mean-rarity")
    module, _, function = name.partition(":")
    if not function:
        raise DataError(
            f"{name!r} is no measure: give {', '.join(BUILT_IN)}, or a function of your own as "
            f"module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise DataError(f"the measure {name!r} can't be imported: {error}") from None
    if not callable(found):
        raise DataError(f"the measure {name!r} is no function")
    metric: Metric = found
    return metric
