"""The states of a rank's random generators, stored again as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mds_ckpt.pickles.archive import TorchFile
from mds_ckpt.pickles.records import TensorRef

__all__ = ["RandomState"]


@dataclass(frozen=True, slots=True)
class RandomState:
    """What ``rng_state`` of a file holds: for each data-parallel rank, or for all of them."""

    file: TorchFile
    stored: list[Any]

    def value(self) -> Any:
        """The stored value, with its tensors read."""
        return self._carried(self.stored)

    def _carried(self, value: Any) -> Any:
        if isinstance(value, TensorRef):
            return self.file.read(value)
        if isinstance(value, Mapping):
            return {key: self._carried(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._carried(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._carried(item) for item in value)
        return value
