"""Several datasets mixed by weight into one."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from mds_data.sampling.blend import balanced_blend, megatron_blend

__all__ = ["BlendedDataset", "SampleSource"]


class SampleSource(Protocol):
    """A dataset with a length and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, NDArray[Any]]: ...


class BlendedDataset:
    """Samples of several datasets, each by its share.

    Weights are shares of the samples: only their ratios count. A dataset that has fewer samples
    than its share begins again with its first one.

    Args:
        datasets: The sources.
        weights: One weight a source; the sources' lengths if None. 0 leaves a source out.
        num_samples: Length of the blend; the sources' lengths together if None.
        order: ``"balanced"`` keeps each source within one sample of its share at every prefix;
            ``"megatron"`` is the original's greedy order, bit for bit.

    Raises:
        ValueError: A weight can't be, or there is not one for each dataset.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        order: Literal["balanced", "megatron"] = "balanced",
    ) -> None:
        lengths = [len(dataset) for dataset in datasets]
        weights = [float(length) for length in lengths] if weights is None else list(weights)
        if len(weights) != len(datasets) or not datasets:
            raise ValueError(
                f"{len(datasets)} datasets need as many weights, but {len(weights)} were given"
            )
        if len(datasets) > 2**15:
            raise ValueError(f"at most 32768 datasets can be blended, not {len(datasets)}")
        self._length = sum(lengths) if num_samples is None else num_samples
        if self._length < 0:
            raise ValueError(f"num_samples ({num_samples}) must not be negative")
        self.datasets = tuple(datasets)
        self.weights = tuple(weights)
        self._lengths = lengths
        if order == "balanced":
            blend = balanced_blend(weights, count=self._length)
            self._locate = blend.locate
        elif order == "megatron":
            self._greedy = megatron_blend(weights, count=self._length)
            self._locate = self._locate_greedy
        else:
            raise ValueError(f"order must be 'balanced' or 'megatron', not {order!r}")
        for number, weight in enumerate(weights):
            if weight and not lengths[number] and self._length:
                raise ValueError(
                    f"dataset {number} has weight {weight} and no sample; leave it out"
                )

    def _locate_greedy(self, place: int) -> tuple[int, int]:
        sources, numbers = self._greedy
        return int(sources[place]), int(numbers[place])

    def __len__(self) -> int:
        return self._length

    def source(self, number: int) -> tuple[int, int]:
        """Which dataset sample ``number`` is from, and its number there."""
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        source, inner = self._locate(place)
        return source, inner % self._lengths[source]

    def __getitem__(self, number: int) -> Mapping[str, NDArray[Any]]:
        source, inner = self.source(number)
        return self.datasets[source][inner]
