"""What a checkpoint is, as plain data: from headers alone, or with statistics of the numbers.

The result of :func:`summary` is the stable schema of ``inspect --json``; members may be added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.checks import Problem
from mds_ckpt.companions import NAMES
from mds_ckpt.formats import all_formats

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

SCHEMA = "mds-ckpt/inspect/1"
_CHUNK = 1 << 20
"""Numbers that statistics look at in one go."""


def summary(
    checkpoint: Checkpoint, *, pattern: str | None = None, stats: bool = False
) -> dict[str, Any]:
    """Everything that ``inspect`` shows, as JSON can hold it.

    Args:
        checkpoint: An opened checkpoint.
        pattern: Only tensors whose canonical name matches this shell pattern.
        stats: Read the tensors and add norm, minimum, maximum and counts of what is not finite.
    """
    manifest = checkpoint.manifest
    return {
        "schema": SCHEMA,
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "title": all_formats()[checkpoint.format].title,
        "step": checkpoint.step,
        "counters": dict(checkpoint.counters),
        "model": {
            "family": checkpoint.model.family,
            "vocab_size": checkpoint.model.vocab_size,
            "padded_vocab_size": checkpoint.model.padded_vocab_size,
            "tied_embeddings": checkpoint.model.tied_embeddings,
            "config": dict(checkpoint.model.config),
        },
        "parallel": dict(checkpoint.parallel),
        "num_params": sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        "states": {state: _totals(tensors) for state, tensors in checkpoint.states.items()},
        "files": {} if manifest is None else {n: r.size for n, r in manifest.files.items()},
        "companions": sorted({*checkpoint.companions, *NAMES.intersection(checkpoint.sealed)}),
        "producer": None if manifest is None else dict(manifest.producer),
        "created": None if manifest is None else manifest.created,
        "notes": list(checkpoint.notes),
        "problems": [_problem(problem) for problem in problems(checkpoint, data=False)],
        "tensors": [
            _tensor(checkpoint, name, stats=stats)
            for name in _names(checkpoint)
            if pattern is None or fnmatchcase(name, pattern)
        ],
    }


def problems(checkpoint: Checkpoint, *, data: bool) -> Iterator[Problem]:
    """What is wrong with a checkpoint; with ``data`` every byte is read and compared."""
    return all_formats()[checkpoint.format].check(checkpoint, data)


def _problem(problem: Problem) -> dict[str, str | None]:
    return {"file": problem.file, "tensor": problem.tensor, "reason": problem.reason}


def _totals(tensors: Mapping[str, LazyTensor]) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    for tensor in tensors.values():
        dtypes[tensor.dtype] += tensor.nbytes
    return {
        "tensors": len(tensors),
        "numbers": sum(math.prod(tensor.shape) for tensor in tensors.values()),
        "bytes": sum(dtypes.values()),
        "bytes_by_dtype": dict(dtypes),
    }


def _names(checkpoint: Checkpoint) -> list[str]:
    """Canonical names in order, those that have a weight first."""
    return list(dict.fromkeys(name for tensors in checkpoint.states.values() for name in tensors))


def _tensor(checkpoint: Checkpoint, name: str, *, stats: bool) -> dict[str, Any]:
    states = {
        state: tensors[name] for state, tensors in checkpoint.states.items() if name in tensors
    }
    first = states.get("weight") or next(iter(states.values()))
    members: dict[str, Any] = {
        "name": name,
        "shape": list(first.shape),
        "dtype": first.dtype,
        "bytes": sum(tensor.nbytes for tensor in states.values()),
        "states": {state: tensor.dtype for state, tensor in states.items()},
    }
    if stats:
        members["stats"] = {state: statistics(tensor.numpy()) for state, tensor in states.items()}
    return members


def statistics(array: Array) -> dict[str, float | int | None]:
    """Norm, least, greatest and mean of the finite numbers, and how many are not finite or zero.

    Sums are in float64, over parts of the array, so that no second copy of it is made.
    """
    import numpy as np

    flat = array.reshape(-1)
    square = total = 0.0
    least, greatest = math.inf, -math.inf
    nan = infinite = zero = 0
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK].astype(np.float64)
        finite = part[np.isfinite(part)]
        nan += int(np.isnan(part).sum())
        infinite += int(np.isinf(part).sum())
        zero += int((finite == 0).sum())
        if finite.size:
            square += float(finite @ finite)
            total += float(finite.sum())
            least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
    count = flat.size - nan - infinite
    return {
        "norm": math.sqrt(square),
        "min": least if count else None,
        "max": greatest if count else None,
        "mean": total / count if count else None,
        "nan": nan,
        "inf": infinite,
        "zero": zero,
    }
