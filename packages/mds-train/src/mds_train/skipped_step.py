"""Why a step was skipped: which gradients were not finite, and on whose samples the loss was not.

Asked only after a step was skipped, so that it costs the others nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from mds_train.batches import ModelInput
from mds_train.engines.interface import BrokenGradient
from mds_train.exchange import gather_from_all

__all__ = ["SkipCause", "find_cause"]

_SENT = 8  # gradients that each rank tells the others of
_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipCause:
    """What all ranks together know of a skipped step."""

    gradients: tuple[tuple[int, BrokenGradient], ...]
    """Ranks and what each has of the gradients that were not finite; the first few of each rank."""

    parameters: int
    """Parameters whose gradients were not finite, on the rank that has the most of them."""

    samples: tuple[tuple[int, tuple[int, ...]], ...]
    """Ranks whose loss was not finite, and their samples; empty where only gradients were."""

    def sentence(self) -> str:
        """One or two sentences for people; empty if nothing was found."""
        said = []
        if self.gradients:
            shown = [
                f"{each.name} on rank {rank} ({each.count} of {each.numel} elements)"
                for rank, each in self._one_a_parameter()[:_SHOWN]
            ]
            more = self.parameters - len(shown)
            said.append(f"Not finite: {', '.join(shown)}{f' and {more} more' * (more > 0)}.")
        if self.samples:
            shown = [f"{rank} (samples {_listed(ids)})" for rank, ids in self.samples[:_SHOWN]]
            more = len(self.samples) - len(shown)
            rest = f" and {more} more" * (more > 0)
            said.append(f"The loss itself was not finite on rank {', '.join(shown)}{rest}.")
        return " ".join(said)

    def details(self) -> dict[str, Any]:
        """The same for metrics.jsonl."""
        return {
            "gradients": [{"rank": rank, **asdict(each)} for rank, each in self.gradients],
            "samples_of_ranks": {str(rank): list(ids) for rank, ids in self.samples},
        }

    def _one_a_parameter(self) -> list[tuple[int, BrokenGradient]]:
        first: dict[str, tuple[int, BrokenGradient]] = {}
        for rank, each in self.gradients:
            first.setdefault(each.name, (rank, each))
        return list(first.values())


def _listed(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:_SENT]))
    return shown + ", ..." * (len(ids) > _SENT)


def find_cause(
    broken: Sequence[BrokenGradient], *, batch: Sequence[ModelInput], total: Tensor
) -> SkipCause:
    """Put together what the ranks found. Collective.

    Args:
        broken: This rank's gradients that were not finite.
        batch: This rank's micro batches.
        total: The sums of its losses.
    """
    ids: tuple[int, ...] = ()
    if not bool(total.isfinite().all()):
        ids = tuple(int(number) for micro in batch for number in micro.samples.tolist())
    rank = dist.get_rank() if dist.is_initialized() else 0
    told = gather_from_all((rank, tuple(broken[:_SENT]), len(broken), ids))
    return SkipCause(
        gradients=tuple((rank, each) for rank, few, _, _ in told for each in few),
        parameters=max(count for _, _, count, _ in told),
        samples=tuple((rank, numbers) for rank, _, _, numbers in told if numbers),
    )
