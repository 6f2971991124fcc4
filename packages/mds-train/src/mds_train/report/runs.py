"""A run as its folder tells it: settings, history, and what follows from both."""

from __future__ import annotations

import itertools
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mds_train.config.model import ModelConfig
from mds_train.errors import InputError
from mds_train.watch.metrics import METRICS_FILE, History, read_metrics

__all__ = ["Jump", "Run", "read_run"]

_WARM_UP = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Jump:
    """How the training loss went on where a run was taken up again."""

    step: int
    change: float
    """Loss of the first step after it, less that of the last step before."""
    usual: float
    """Median change from one step to the next around it, for comparison."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a report needs to know of one run."""

    name: str
    folder: Path
    settings: Mapping[str, Mapping[str, Any]]
    """The tables of config.toml."""
    history: History

    @property
    def world_size(self) -> int:
        """Ranks of the last start."""
        sizes = [event["world_size"] for event in self.history.events if event.get("world_size")]
        return int(sizes[-1]) if sizes else 1

    @property
    def layout(self) -> str:
        """Degrees of the last start: ``tp 2 · dp 4 · ZeRO 1``."""
        degrees = [event["parallel"] for event in self.history.events if event.get("parallel")]
        if not degrees:
            return "unknown"
        last = dict(degrees[-1])
        stage = last.pop("zero_stage", None)
        words = [f"{name} {size}" for name, size in last.items() if size != 1]
        return " · ".join([*(words or ["1 rank"]), f"ZeRO {stage}"])

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the model."""
        counts = [e["num_parameters"] for e in self.history.events if e.get("num_parameters")]
        return int(counts[-1]) if counts else None

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of forward and backward of one token; None if the model is not known."""
        model, data = self.settings.get("model", {}), self.settings.get("data", {})
        length, decoder = data.get("seq_length"), data.get("decoder_seq_length")
        if length is None:
            return None
        try:
            flops: float = ModelConfig(**model).flops_of_sample(length, decoder_seq_length=decoder)
        except (TypeError, ValueError):
            return None
        return flops / float(length + (decoder or 0))

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the steps, without the first ones of the run."""
        rates = self.values("tokens_per_second")
        return statistics.median(rates[_WARM_UP:] or rates) if rates else None

    @property
    def teraflops(self) -> float | None:
        """Median TFLOP/s of all ranks together."""
        rate, flops = self.tokens_per_second, self.flops_per_token
        return None if rate is None or flops is None else rate * flops / 1e12

    def values(self, key: str) -> list[float]:
        """This number of each step that has it."""
        return [float(entry[key]) for entry in self.history.train if entry.get(key) is not None]

    def series(self, key: str, *, x: str = "step") -> tuple[list[float], list[float]]:
        """X and y of each step that has both."""
        return _series(self.history.train, key, x=x)

    def validation(self, *, x: str = "step") -> dict[str, tuple[list[float], list[float]]]:
        """X and y of each validation set by name; x is looked up by step where it is not noted."""
        known = {entry["step"]: entry for entry in self.history.train}
        sets: dict[str, list[Mapping[str, Any]]] = {}
        for entry in self.history.validation:
            place = known.get(entry["step"], {}).get(x) if x != "step" else entry["step"]
            if place is not None:
                sets.setdefault(str(entry.get("name", "validation")), []).append(
                    {**entry, x: place}
                )
        return {name: _series(entries, "loss", x=x) for name, entries in sets.items()}

    def jumps(self) -> list[Jump]:
        """The training loss at each point where the run was taken up again."""
        losses = {int(e["step"]): e["loss"] for e in self.history.train if e["loss"] is not None}
        found = []
        for step in self.history.resume_steps:
            if step in losses and step + 1 in losses:
                near = [losses[s] for s in range(step - 20, step + 21) if s in losses]
                changes = [abs(b - a) for a, b in itertools.pairwise(near)]
                found.append(
                    Jump(
                        step=step,
                        change=losses[step + 1] - losses[step],
                        usual=statistics.median(changes),
                    )
                )
        return found


def _series(
    entries: Sequence[Mapping[str, Any]], key: str, *, x: str
) -> tuple[list[float], list[float]]:
    kept = [e for e in entries if e.get(key) is not None and e.get(x) is not None]
    return [float(e[x]) for e in kept], [float(e[key]) for e in kept]


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        InputError: It holds no metrics, or damaged ones.
    """
    metrics = folder / METRICS_FILE
    if not metrics.is_file():
        raise InputError(
            f"{folder} holds no {METRICS_FILE}: it is no run, or one that never began. Name the "
            f"folder that train.run_dir named."
        )
    config = folder / "config.toml"
    try:
        settings = tomllib.loads(config.read_text("utf-8")) if config.is_file() else {}
        history = read_metrics(metrics)
    except ValueError as error:
        raise InputError(
            str(error) if str(metrics) in str(error) else f"{config}: {error}"
        ) from error
    if not history.train:
        raise InputError(f"{metrics} holds no finished step yet; report on the run later.")
    return Run(name=folder.name, folder=folder, settings=settings, history=history)
