"""GLUE's tasks from their published files, and the numbers that each is judged by."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mds_train.errors import InputError

__all__ = ["TASKS", "GlueTask", "Sentences", "judge", "read_glue"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GlueTask:
    """How a task's file is read, and what counts."""

    texts: tuple[str, ...]
    """Names of the columns with the one or two texts."""
    label: str
    """Name of the column with the label."""
    labels: tuple[str, ...] = ()
    """The labels in order; a task without any asks for a number."""
    header: tuple[str, ...] = ()
    """Names of the columns where the file has no line of them."""
    metrics: tuple[str, ...] = ("accuracy",)


@dataclass(frozen=True, slots=True)
class Sentences:
    """A sample of a task."""

    first: str
    second: str | None
    label: float
    """The number of the label, or the number that is asked for."""


_ENTAILMENT = ("entailment", "not_entailment")
TASKS: Mapping[str, GlueTask] = MappingProxyType(
    {
        "CoLA": GlueTask(
            texts=("sentence",),
            label="label",
            labels=("0", "1"),
            header=("source", "label", "mark", "sentence"),
            metrics=("matthews", "accuracy"),
        ),
        "SST-2": GlueTask(texts=("sentence",), label="label", labels=("0", "1")),
        "MRPC": GlueTask(
            texts=("#1 String", "#2 String"),
            label="Quality",
            labels=("0", "1"),
            metrics=("accuracy", "f1"),
        ),
        "STS-B": GlueTask(
            texts=("sentence1", "sentence2"), label="score", metrics=("pearson", "spearman")
        ),
        "QQP": GlueTask(
            texts=("question1", "question2"),
            label="is_duplicate",
            labels=("0", "1"),
            metrics=("accuracy", "f1"),
        ),
        "MNLI": GlueTask(
            texts=("sentence1", "sentence2"),
            label="gold_label",
            labels=("contradiction", "entailment", "neutral"),
        ),
        "QNLI": GlueTask(texts=("question", "sentence"), label="label", labels=_ENTAILMENT),
        "RTE": GlueTask(texts=("sentence1", "sentence2"), label="label", labels=_ENTAILMENT),
    }
)


def read_glue(path: Path, task: GlueTask) -> list[Sentences]:
    """Read a training or development file (.tsv) as GLUE publishes it.

    Lines with too few columns, of which QQP's file has some, are left out with a warning.

    Raises:
        InputError: If it is not UTF-8, lacks a column, or has an unknown label.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text in UTF-8; convert it first.") from error
    header, first = (task.header, 0) if task.header else (tuple(lines[0].split("\t")), 1)
    header = tuple(name.strip() for name in header)
    missing = [name for name in (*task.texts, task.label) if name not in header]
    if missing:
        raise InputError(
            f"{path}: the first line names no column {', '.join(missing)}; take the file of this "
            "task as GLUE publishes it (a test file has no labels)."
        )
    found = list(_samples(path, lines, task=task, header=header, first=first))
    if not found:
        raise InputError(f"{path}: there is no sample in it.")
    return found


def _samples(
    path: Path, lines: Sequence[str], *, task: GlueTask, header: Sequence[str], first: int
) -> Iterator[Sentences]:
    short = 0
    for number, line in enumerate(lines[first:], start=first + 1):
        cells = line.rstrip("\r").split("\t")
        if not line.strip():
            continue
        if len(cells) < len(header):
            short += 1
            continue
        row = dict(zip(header, cells, strict=False))
        texts = [row[name].strip() for name in task.texts]
        label = _label(path, number, row[task.label].strip(), task=task)
        yield Sentences(texts[0], texts[1] if len(texts) > 1 else None, label)
    if short:
        logger.warning("%s: %d lines have too few columns; left out.", path, short)


def _label(path: Path, number: int, cell: str, *, task: GlueTask) -> float:
    if task.labels and cell in task.labels:
        return float(task.labels.index(cell))
    try:
        value = math.nan if task.labels else float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        wanted = " or ".join(task.labels) or "a number"
        raise InputError(f"{path}, line {number}: the label is {cell[:40]!r}, not {wanted}.")
    return value


def judge(
    metrics: Sequence[str], guesses: Sequence[float], right: Sequence[float]
) -> dict[str, float]:
    """Each metric of guesses beside what is right."""
    ours, theirs = np.asarray(guesses, float), np.asarray(right, float)
    return {name: _METRICS[name](ours, theirs) for name in metrics}


def _accuracy(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float((ours == theirs).mean())


def _f1(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Of the label 1."""
    hits = float(((ours == 1) & (theirs == 1)).sum())
    together = float((ours == 1).sum() + (theirs == 1).sum())
    return 2 * hits / together if together else 0.0


def _pearson(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Correlation; 0 if one side is constant, as for Matthews' coefficient."""
    ours, theirs = ours - ours.mean(), theirs - theirs.mean()
    size = math.sqrt(float((ours**2).sum()) * float((theirs**2).sum()))
    return float((ours * theirs).sum()) / size if size else 0.0


def _spearman(ours: np.ndarray, theirs: np.ndarray) -> float:
    return _pearson(_ranks(ours), _ranks(theirs))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Places in order; equal values share the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    places: np.ndarray = (last - (counts - 1) / 2)[group]
    return places


_METRICS = MappingProxyType(
    {
        "accuracy": _accuracy,
        "f1": _f1,
        "matthews": _pearson,  # of two labels it is their correlation
        "pearson": _pearson,
        "spearman": _spearman,
    }
)
