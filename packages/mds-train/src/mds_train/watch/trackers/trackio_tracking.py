"""trackio, from the extra `trackio`: a local dashboard in the manner of W&B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["open_trackio"]


class _TrackioRun:
    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def finish(self, *, failed: bool) -> None:
        del failed
        self._run.finish()


def open_trackio(
    *, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
) -> _TrackioRun:
    """Open a run; one of the same name in the project goes on."""
    del folder
    try:
        import trackio  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            'watch.trackers names "trackio", which is not installed: pip install '
            '"mds-train[trackio]"'
        ) from error
    run = trackio.init(project=project, name=run_name, resume="allow", config=dict(settings))
    return _TrackioRun(run)
