"""Weights & Biases, from the extra `wandb`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["open_wandb"]


class _WandbRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def open_wandb(
    *, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
) -> _WandbRun:
    """Open a run; its id is that of the folder, so a resumed run goes on in it.

    WANDB_MODE=offline keeps everything below RUN_DIR/wandb, for `wandb sync`.
    """
    try:
        import wandb  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            'watch.trackers names "wandb", which is not installed: pip install "mds-train[wandb]"'
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    run = wandb.init(
        project=project,
        name=run_name,
        dir=str(folder),
        id=identity,
        resume="allow",
        config=dict(settings),
    )
    return _WandbRun(run)
