"""Shorter samples at the beginning of training: the sequence-length curriculum."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mds_data.datasets.blended import SampleSource
from mds_data.sampling.pacing import Pacing

__all__ = ["LengthCurriculum", "reshaped", "truncated"]


class LengthCurriculum:
    """A dataset whose samples are cut to the length that the curriculum allows.

    Number ``n`` belongs to step ``n // global_batch_size``, so all samples of a step are of one
    length, whatever the ranks; the sampler must not shuffle (the datasets here shuffle by
    themselves).

    Args:
        dataset: The samples.
        pacing: Length by step.
        global_batch_size: Samples of a step over all ranks.
    """

    def __init__(self, dataset: SampleSource, pacing: Pacing, *, global_batch_size: int) -> None:
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size ({global_batch_size}) must be at least 1")
        if pacing.at(0) < 1:
            raise ValueError(
                f"the curriculum begins with {pacing.at(0)} tokens; its minimum must be at least "
                f"its step"
            )
        self.dataset = dataset
        self.pacing = pacing
        self.global_batch_size = global_batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def length(self, number: int) -> int:
        """Tokens of sample ``number``."""
        return self.pacing.at(number // self.global_batch_size)

    def __getitem__(self, number: int) -> Mapping[str, NDArray[Any]]:
        place = number + len(self) if number < 0 else number
        return truncated(self.dataset[place], self.length(place))


def truncated(sample: Mapping[str, NDArray[Any]], length: int) -> dict[str, NDArray[Any]]:
    """The first ``length`` tokens of a sample [s], borders of documents included."""
    return {name: _cut(name, values, length) for name, values in sample.items()}


def _cut(name: str, values: NDArray[Any], length: int) -> NDArray[Any]:
    if name == "cumulative_lengths":
        return _cut_borders(values, length)
    return values[:length] if values.ndim else values


def _cut_borders(borders: NDArray[Any], length: int) -> NDArray[Any]:
    inside = borders[borders < length]
    return np.append(inside, np.asarray(min(length, int(borders[-1])), borders.dtype))


def reshaped(batch: Mapping[str, NDArray[Any]], length: int) -> dict[str, NDArray[Any]]:
    """A batch [b, s] as [b * (s // length), length]: more and shorter samples, hardly a token lost.

    What does not fill a whole sample at the end of each row is dropped. ``position_ids`` begin at 0
    in each new sample.
    """
    result = {}
    for name, values in batch.items():
        if values.ndim != 2:
            raise ValueError(f"{name} has {values.ndim} dimensions; only [b, s] can be reshaped")
        whole = values.shape[1] // length * length
        result[name] = values[:, :whole].reshape(-1, length)
    if "position_ids" in result:
        result["position_ids"] = result["position_ids"] - result["position_ids"][:, :1]
    return result
