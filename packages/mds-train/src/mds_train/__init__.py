"""Trains large transformers on any layout, from one CPU to a cluster, and resumes exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mds_train.config import TrainConfig
    from mds_train.loop import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "train"]


def __getattr__(name: str) -> Any:
    # torch takes over a second to import: commands that do not need it, like --help, are spared it.
    if name == "TrainConfig":
        from mds_train.config import TrainConfig

        return TrainConfig
    if name in ("TrainResult", "train"):
        from mds_train import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
