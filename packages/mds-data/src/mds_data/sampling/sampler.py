"""Which samples a step trains on, for any number of ranks and workers, from one number of state.

The global order is computed from the seed. A step takes the next ``global_batch_size`` places of
it, and ranks share those out, so another number of ranks goes on with exactly the same batches.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mds_data.sampling.permutation import EpochOrder

__all__ = ["ResumableSampler", "SampleOrder"]


class SampleOrder(Protocol):
    """An order of sample numbers without end."""

    def indices(self, start: int, count: int) -> NDArray[np.int64]:
        """[count] the sample numbers at places ``start`` to ``start + count``."""
        ...


class ResumableSampler:
    """Batches of sample numbers that can stop anywhere and go on anywhere.

    As an iterator it yields this rank's micro batches from `consumed_samples` on, which makes it a
    ``batch_sampler`` for a torch DataLoader. Iterating does not move `consumed_samples`: workers
    read ahead of training, so the training loop calls `advance` when a step is done.

    Args:
        num_samples: Samples of an epoch, usually ``len(dataset)``.
        global_batch_size: Samples of one step over all ranks.
        micro_batch_size: Samples that a rank takes at a time; its whole share of a step if None.
        rank: This rank's number among the data-parallel ranks.
        num_ranks: Number of data-parallel ranks.
        shuffle: Permute the samples anew in each epoch. A `GPTDataset` is shuffled by itself.
        seed: Chooses the permutations.
        consumed_samples: Where to begin.
        order: Another endless order of sample numbers, such as a curriculum; ``shuffle`` and
            ``seed`` are then its own affair.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
        shuffle: bool = False,
        seed: int = 1234,
        consumed_samples: int = 0,
        order: SampleOrder | None = None,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank ({rank}) must be one of num_ranks ({num_ranks})")
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples ({consumed_samples}) must not be negative")
        self.num_samples = num_samples
        self.global_batch_size = global_batch_size
        self.rank = rank
        self.num_ranks = num_ranks
        self.shuffle = shuffle
        self.seed = seed
        self.consumed_samples = consumed_samples
        self.micro_batch_size = self._checked_micro_batch(micro_batch_size)
        self._order: SampleOrder = order or EpochOrder(num_samples, seed=seed, shuffle=shuffle)

    def _checked_micro_batch(self, micro_batch_size: int | None) -> int:
        share, rest = divmod(self.global_batch_size, self.num_ranks)
        if self.global_batch_size < 1 or rest:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of num_ranks "
                f"({self.num_ranks})"
            )
        if micro_batch_size is None:
            return share
        if micro_batch_size < 1 or share % micro_batch_size:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) must be a multiple of "
                f"micro_batch_size ({micro_batch_size}) times num_ranks ({self.num_ranks})"
            )
        return micro_batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next sample, from 0."""
        return self.consumed_samples // self.num_samples

    def indices(self, consumed_samples: int, count: int) -> NDArray[np.int64]:
        """[count] sample numbers of the global order from place ``consumed_samples`` on."""
        return self._order.indices(consumed_samples, count)

    def global_batch(self, step: int) -> NDArray[np.int64]:
        """[global_batch_size] sample numbers of a step, counted from the order's beginning."""
        return self.indices(step * self.global_batch_size, self.global_batch_size)

    def batch(self, step: int) -> NDArray[np.int64]:
        """[micro batches, micro_batch_size] this rank's share of a step."""
        return self.rank_share(self.global_batch(step))

    def rank_share(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """[micro batches, micro_batch_size] this rank's share of a global batch.

        Micro batch ``m`` of all ranks together is a stretch of the global batch, as in Megatron.
        """
        by_rank = samples.reshape(-1, self.num_ranks, self.micro_batch_size)
        return by_rank[:, self.rank]

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        while True:
            for micro_batch in self.rank_share(self.indices(start, self.global_batch_size)):
                yield micro_batch.tolist()
            start += self.global_batch_size

    def advance(self, steps: int = 1) -> None:
        """Count ``steps`` global batches as trained on."""
        self.consumed_samples += steps * self.global_batch_size

    def state_dict(self) -> dict[str, Any]:
        """What to keep to go on later: a few numbers, ready for JSON."""
        return {
            "consumed_samples": self.consumed_samples,
            "epoch": self.epoch,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Go on where `state_dict` was taken, with any number of ranks and any batch size.

        Raises:
            ValueError: The state belongs to another order of samples.
        """
        for name in ("num_samples", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the saved sampler has {name} {state[name]!r}, this one "
                    f"{getattr(self, name)!r}, which is another order of samples; "
                    f"use the saved value, or begin a new run"
                )
        consumed = state["consumed_samples"]
        if type(consumed) is not int or consumed < 0:
            raise ValueError(f"the saved consumed_samples ({consumed!r}) must be a whole number")
        self.consumed_samples = consumed
        return self
