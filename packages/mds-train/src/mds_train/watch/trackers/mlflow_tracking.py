"""MLflow, from the extra `mlflow`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["open_mlflow"]

_LONGEST = 500
"""Characters of a parameter that MLflow takes."""
_AT_ONCE = 100


class _MlflowRun:
    def __init__(self, client: Any, run_id: str, *, metric: Any) -> None:
        self._client = client
        self._run_id = run_id
        self._metric = metric

    def log(self, scalars: Mapping[str, float], *, step: int) -> None:
        self._client.log_batch(
            self._run_id,
            metrics=[self._metric(_plain(name), value, step) for name, value in scalars.items()],
        )

    def finish(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")


def open_mlflow(
    *, project: str, run_name: str, folder: Path, settings: Mapping[str, Any]
) -> _MlflowRun:
    """Open a run in the experiment `project`, at MLFLOW_TRACKING_URI; a resumed one goes on."""
    try:
        import mlflow  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            'watch.trackers names "mlflow", which is not installed: pip install "mds-train[mlflow]"'
        ) from error
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(project)
    experiment_id = (
        client.create_experiment(project) if experiment is None else experiment.experiment_id
    )
    kept = folder / "mlflow-run"
    if kept.is_file():
        run_id = kept.read_text(encoding="utf-8").strip()
    else:
        run_id = client.create_run(experiment_id, run_name=run_name).info.run_id
        folder.mkdir(parents=True, exist_ok=True)
        kept.write_text(run_id + "\n", encoding="utf-8")
        parameters = [
            mlflow.entities.Param(key, str(value)[:_LONGEST]) for key, value in settings.items()
        ]
        for start in range(0, len(parameters), _AT_ONCE):
            client.log_batch(run_id, params=parameters[start : start + _AT_ONCE])

    def metric(name: str, value: float, step: int) -> Any:
        return mlflow.entities.Metric(
            name, value, mlflow.utils.time.get_current_time_millis(), step
        )

    return _MlflowRun(client, run_id, metric=metric)


def _plain(name: str) -> str:
    """MLflow takes letters, digits, underscores, dashes, dots, spaces and slashes."""
    return "".join(c if c.isalnum() or c in "_-. /" else "_" for c in name)
