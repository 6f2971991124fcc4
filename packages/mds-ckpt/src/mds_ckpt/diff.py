"""Compare two checkpoints of any formats by canonical name, number by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.escape import printable
from mds_ckpt.tensors.box import Box, whole

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array

_CHUNK = 1 << 20
_VOCABULARY = frozenset({"embedding.word_embeddings.weight", "output_layer.weight"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Something that two checkpoints don't have in common."""

    tensor: str
    state: str
    reason: str

    def __str__(self) -> str:
        name = self.tensor if self.state == "weight" else f"{self.tensor} ({self.state})"
        return f"{printable(name)}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a comparison found."""

    differences: Sequence[Difference]
    num_compared: int
    notes: Sequence[str]
    """States that only one side has, and types that differ: no differences of the model."""


def compare(
    first: Checkpoint, second: Checkpoint, *, atol: float = 0, rtol: float = 0
) -> Comparison:
    """Compare weights, and the other states that both checkpoints hold.

    Numbers are equal if ``|a - b| <= atol + rtol * |b|``, in float64; not-a-number equals itself.
    Types may differ, only the numbers count. Padding rows of a vocabulary are left out.

    Args:
        first: Where ``a`` comes from.
        second: Where ``b`` comes from.
        atol: Absolute tolerance.
        rtol: Relative tolerance.
    """
    shared = [state for state in first.states if state in second.states]
    notes = [
        f"only {printable(str(side.path))} holds {', '.join(map(printable, alone))}"
        for side, other in ((first, second), (second, first))
        if (alone := [state for state in side.states if state not in other.states])
    ]
    differences: list[Difference] = []
    compared = 0
    retyped = 0
    for state in shared:
        ours, theirs = first.states[state], second.states[state]
        differences += _unmatched(state, first, second)
        for name in (name for name in ours if name in theirs):
            a, b = ours[name], theirs[name]
            retyped += a.dtype != b.dtype
            compared += 1
            reason = _difference(first, second, a, b, atol=atol, rtol=rtol)
            if reason is not None:
                differences.append(Difference(tensor=name, state=state, reason=reason))
    if retyped:
        notes.append(f"{retyped} tensors have different types; their numbers were compared")
    return Comparison(differences=differences, num_compared=compared, notes=notes)


def _unmatched(state: str, first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    for side, other in ((first, second), (second, first)):
        for name in side.states[state]:
            if name not in other.states[state]:
                reason = f"only in {printable(str(side.path))}"
                yield Difference(tensor=name, state=state, reason=reason)


def _difference(
    first: Checkpoint,
    second: Checkpoint,
    a: LazyTensor,
    b: LazyTensor,
    *,
    atol: float,
    rtol: float,
) -> str | None:
    boxes = _true_box(first, a), _true_box(second, b)
    if boxes[0] != boxes[1]:
        return f"shape {list(a.shape)} against {list(b.shape)}"
    return number_difference(a.read(boxes[0]), b.read(boxes[1]), atol=atol, rtol=rtol)


def _true_box(checkpoint: Checkpoint, tensor: LazyTensor) -> Box:
    box = whole(tensor.shape)
    if tensor.name in _VOCABULARY and checkpoint.model.padded_vocab_size is not None:
        return ((0, min(checkpoint.model.vocab_size, tensor.shape[0])), *box[1:])
    return box


def number_difference(a: Array, b: Array, *, atol: float, rtol: float) -> str | None:
    """In how many numbers two arrays of one shape differ, and by how much; None if in none."""
    import numpy as np

    count, worst, where = 0, 0.0, 0
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, flat_a.size, _CHUNK):
        left = flat_a[start : start + _CHUNK].astype(np.float64)
        right = flat_b[start : start + _CHUNK].astype(np.float64)
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(left - right))
            wrong = ~same & ~(gap <= atol + rtol * np.abs(right))
        if wrong.any():
            gap = np.where(wrong, np.where(np.isnan(gap), np.inf, gap), 0.0)
            if count == 0 or gap.max() > worst:
                worst, where = float(gap.max()), start + int(gap.argmax())
            count += int(wrong.sum())
    if count == 0:
        return None
    index = [int(i) for i in np.unravel_index(where, a.shape)]
    return f"{count} of {flat_a.size} numbers differ, most at {index} by {worst:.6g}"
