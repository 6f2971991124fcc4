"""Several datasets mixed by weight into one; the weights may change in the middle of a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, Self

from numpy.typing import NDArray

from mds_data.sampling.blend_phases import BlendPhase, OrderName, PhasedBlend

__all__ = ["BlendedDataset", "SampleSource"]


class SampleSource(Protocol):
    """A dataset with a length and samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Mapping[str, NDArray[Any]]: ...


class BlendedDataset:
    """Samples of several datasets, each by its share.

    Weights are shares of the samples, or of the tokens: only their ratios count. A dataset that has
    fewer samples than its share goes on with its next epoch, or begins again with its first one.

    Args:
        datasets: The sources.
        weights: One weight a source; the sources' lengths if None. 0 leaves a source out.
        num_samples: Length of the blend; the sources' lengths together if None.
        order: ``"balanced"`` keeps each source within one sample of its share at every prefix;
            ``"megatron"`` is the original's greedy order, bit for bit.
        by: ``"samples"``, or ``"tokens"``: a source whose samples hold twice the tokens then gives
            half the samples. It asks each source for its ``tokens_per_sample``.
        phases: Instead of weights: where in the blend which weights begin, as `state_dict` has
            them. Sources keep their places, so none loses or repeats a sample.

    Raises:
        ValueError: A weight can't be, or there is not one for each dataset.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
        order: OrderName = "balanced",
        by: Literal["samples", "tokens"] = "samples",
        phases: Sequence[tuple[int, Sequence[float]]] | None = None,
    ) -> None:
        if len(datasets) > 2**15:
            raise ValueError(f"at most 32768 datasets can be blended, not {len(datasets)}")
        if by not in ("samples", "tokens"):
            raise ValueError(f"by must be 'samples' or 'tokens', not {by!r}")
        self.datasets = tuple(datasets)
        self._lengths = [len(dataset) for dataset in datasets]
        self._length = sum(self._lengths) if num_samples is None else num_samples
        if self._length < 0:
            raise ValueError(f"num_samples ({num_samples}) must not be negative")
        self.order = order
        self.by = by
        self.phases = self._checked(weights, phases)
        sizes = [1.0] * len(datasets) if by == "samples" else _tokens_per_sample(datasets)
        self._blend = PhasedBlend(
            [
                BlendPhase(start, tuple(w / size for w, size in zip(given, sizes, strict=False)))
                for start, given in self.phases
            ],
            count=self._length,
            order=order,
        )

    def _checked(
        self,
        weights: Sequence[float] | None,
        phases: Sequence[tuple[int, Sequence[float]]] | None,
    ) -> tuple[tuple[int, tuple[float, ...]], ...]:
        if phases is not None and weights is not None:
            raise ValueError("give weights or phases, not both")
        if phases is None:
            given = [float(length) for length in self._lengths] if weights is None else weights
            phases = [(0, given)]
        last = phases[-1][1] if phases else ()
        if not self.datasets:
            raise ValueError("a blend needs at least one dataset")
        if len(last) != len(self.datasets):
            raise ValueError(
                f"{len(self.datasets)} datasets need as many weights, but {len(last)} were given"
            )
        for start, shares in phases:
            for number, weight in enumerate(shares[: len(self.datasets)]):
                if weight and not self._lengths[number] and start < self._length:
                    raise ValueError(
                        f"dataset {number} has weight {weight} and no sample; leave it out"
                    )
        return tuple((start, tuple(shares)) for start, shares in phases)

    @property
    def weights(self) -> tuple[float, ...]:
        """The weights of the last phase."""
        return self.phases[-1][1]

    def __len__(self) -> int:
        return self._length

    def source(self, number: int) -> tuple[int, int]:
        """Which dataset sample ``number`` is from, and its number there, below its ``len``.

        Datasets with ``beyond`` (those of this package) go on with another epoch at their end,
        others begin again with that number.
        """
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        source, inner = self._blend.locate(place)
        return source, inner % self._lengths[source]

    def __getitem__(self, number: int) -> Mapping[str, NDArray[Any]]:
        place = number + self._length if number < 0 else number
        if not 0 <= place < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        source, inner = self._blend.locate(place)
        if inner < self._lengths[source]:
            return self.datasets[source][inner]
        beyond = getattr(self.datasets[source], "beyond", None)
        if beyond is None:
            return self.datasets[source][inner % self._lengths[source]]
        sample: Mapping[str, NDArray[Any]] = beyond(inner)
        return sample

    @property
    def is_plain(self) -> bool:
        """Whether every sample is its window and nothing more, and all are of one length."""
        sizes = {getattr(each, "seq_length", None) for each in self.datasets}
        return len(sizes) == 1 and all(getattr(each, "is_plain", False) for each in self.datasets)

    def window_beyond(self, number: int) -> NDArray[Any]:
        """[s + 1] the window of sample ``number``, if `is_plain`."""
        if not 0 <= number < self._length:
            raise IndexError(f"sample {number} of {self._length}")
        source, inner = self._blend.locate(number)
        plain: Any = self.datasets[source]
        window: NDArray[Any] = plain.window_beyond(inner)
        return window

    def counts(self, place: int) -> list[int]:
        """The ledger: samples that each dataset gave before place ``place``, repeats counted."""
        if not 0 <= place <= self._length:
            raise IndexError(f"place {place} of {self._length}")
        return self._blend.counts(place)

    def changed(
        self,
        weights: Sequence[float],
        *,
        at: int,
        more: Sequence[SampleSource] = (),
        num_samples: int | None = None,
    ) -> "BlendedDataset":
        """This blend with other weights from place ``at`` on; what came before stays as it was.

        Args:
            weights: One weight a source, new sources included.
            at: First place with the new weights, usually the sampler's ``consumed_samples``.
            more: Datasets that join.
            num_samples: A new length; the old one if None.
        """
        kept = [phase for phase in self.phases if phase[0] < at]
        return type(self)(
            [*self.datasets, *more],
            num_samples=self._length if num_samples is None else num_samples,
            order=self.order,
            by=self.by,
            phases=[*kept, (at, tuple(weights))],
        )

    def state_dict(self) -> dict[str, Any]:
        """What makes this blend again from the same datasets, ready for JSON."""
        return {
            "phases": [[start, list(weights)] for start, weights in self.phases],
            "num_samples": self._length,
            "order": self.order,
            "by": self.by,
        }

    @classmethod
    def from_state_dict(cls, datasets: Sequence[SampleSource], state: Mapping[str, Any]) -> Self:
        """The blend that `state_dict` describes."""
        return cls(
            datasets,
            num_samples=state["num_samples"],
            order=state["order"],
            by=state["by"],
            phases=[(start, weights) for start, weights in state["phases"]],
        )


def _tokens_per_sample(datasets: Sequence[SampleSource]) -> list[float]:
    sizes = []
    for number, dataset in enumerate(datasets):
        size = getattr(dataset, "tokens_per_sample", None)
        if not size:
            raise ValueError(
                f"dataset {number} does not know its tokens_per_sample, so it can't be blended by "
                f"tokens; blend by samples"
            )
        sizes.append(float(size))
    return sizes
