"""Micro batches of a GPT with a teacher: their loss has two terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from mds_core.models import DistilledLoss
from mds_train.batches import Collate, MicroBatch, ModelInput, Samples
from mds_train.data.documents import DocumentBatch

__all__ = ["taught"]


class _Taught:
    """Makes the loss of a GPT's micro batch two terms; without an asked teacher the second is 0."""

    __slots__ = ()
    TERMS: ClassVar[tuple[str, ...]] = ("text", "teacher")

    def counts(self: Any) -> Tensor:
        """[2] float64: both are means over the same tokens."""
        return MicroBatch.counts(self).expand(2)

    def terms(self, output: Any) -> tuple[Tensor, ...]:
        """The sum of each term over this micro batch, differentiable."""
        if isinstance(output, DistilledLoss):
            return output.loss_sum, output.divergence_sum
        return output.loss_sum, torch.zeros_like(output.loss_sum)

    def sums(self: Any, output: Any) -> Tensor:
        """[2] float64: the same, summed exactly and detached."""
        text = MicroBatch.sums(self, output)
        divergences = getattr(output, "divergences", None)  # a pipeline's loss has them, too
        if divergences is None:
            return torch.cat([text, torch.zeros_like(text)])
        apart = (divergences.double() * self.loss_mask).sum()
        return torch.cat([text, apart[None]])


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaughtBatch(_Taught, MicroBatch):
    """A GPT's micro batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _TaughtDocuments(_Taught, DocumentBatch):
    """A GPT's micro batch of documents that do not see each other."""


_KINDS: Mapping[type[ModelInput], type[ModelInput]] = MappingProxyType(
    {MicroBatch: _TaughtBatch, DocumentBatch: _TaughtDocuments}
)


def taught(collate: Collate) -> Collate:
    """Reads the same samples for a model with a teacher."""

    def read(dataset: Samples, numbers: Sequence[int]) -> ModelInput:
        batch = collate(dataset, numbers)
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return _KINDS[type(batch)](**values)

    return read
