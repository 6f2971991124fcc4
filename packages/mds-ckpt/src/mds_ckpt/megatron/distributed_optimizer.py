"""Megatron's distributed optimizer: fp32 parameters and moments in one flat buffer a model chunk.

The file names no parameter. Megatron lays them in the reverse of the order in which the model
registers them, which is that of the model file, and pads the end. So the buffers are cut in that
order, and the cut is believed only if its fp32 parameters round to the model's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mds_ckpt.megatron.assemble import TorchSource
from mds_ckpt.megatron.indexed_state import IndexedError
from mds_ckpt.megatron.zero import MASTER, FlatPart
from mds_ckpt.pickles.archive import TorchFile, open_torch_file
from mds_ckpt.pickles.records import TensorRef, TorchDtype

__all__ = ["FILE", "distributed_parts", "distributed_step"]

FILE = "distrib_optim.pt"
Parts = Iterator[tuple[int, FlatPart, tuple[int, ...]]]
_STATES: Mapping[str, str] = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_MOST_PADDING = 1 << 16
_SAMPLE = 1 << 16
"""Elements up to which a parameter is compared with its weight."""


def distributed_parts(
    path: Path, weights: TorchFile, chunks: Sequence[Mapping[str, TensorRef]]
) -> Parts:
    """What a rank's optimizer holds: the model chunk, the part, and the parameter's local shape.

    Args:
        path: The file ``distrib_optim.pt``.
        weights: The rank's model file.
        chunks: The parameters of each model chunk, in the order of the model.

    Raises:
        IndexedError: The file has another form, or the order is not the model's.
    """
    file = open_torch_file(path)
    models = file.value
    if not isinstance(models, Mapping) or sorted(map(str, models)) != [
        str(number) for number in range(len(chunks))
    ]:
        raise IndexedError(f"{FILE} does not hold a buffer for each of {len(chunks)} model chunks")
    for number, parameters in enumerate(chunks):
        buffers = models.get(number)
        if not isinstance(buffers, Mapping) or not buffers:
            raise IndexedError(f"{FILE} holds no buffers of model chunk {number}")
        for dtype, buffer in buffers.items():
            mine = _of_type(parameters, dtype, alone=len(buffers) == 1)
            for part, shape in _cut(file, weights, buffer, mine):
                yield number, part, shape


def distributed_step(optimizer: Any) -> int | None:
    """The count of steps that the groups of the optimizer keep."""
    inner = optimizer.get("optimizer") if isinstance(optimizer, Mapping) else None
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    steps = [g.get("step") for g in groups or () if isinstance(g, Mapping)]
    return next((step for step in steps if type(step) is int), None)


def _of_type(
    parameters: Mapping[str, TensorRef], dtype: Any, *, alone: bool
) -> dict[str, TensorRef]:
    """The parameters of a buffer: all of them, or those of its type where there are several."""
    if alone:
        return dict(parameters)
    name = dtype.name if isinstance(dtype, TorchDtype) else str(dtype).removeprefix("torch.")
    short = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}.get(name)
    return {key: tensor for key, tensor in parameters.items() if tensor.dtype == short}


def _cut(
    file: TorchFile, weights: TorchFile, buffer: Any, parameters: Mapping[str, TensorRef]
) -> Iterator[tuple[FlatPart, tuple[int, ...]]]:
    total = sum(tensor.numel for tensor in parameters.values())
    flats: dict[str, TensorRef] = {}
    for word, state in _STATES.items():
        flat = buffer.get(word) if isinstance(buffer, Mapping) else None
        if not isinstance(flat, TensorRef) or len(flat.shape) != 1:
            raise IndexedError(f"{FILE} has no flat '{word}', so it is of another Megatron")
        if not total <= flat.numel < total + _MOST_PADDING:
            raise IndexedError(
                f"'{word}' in {FILE} has {flat.numel} elements and the parameters {total}"
            )
        flats[state] = flat
    at = total
    for name, tensor in parameters.items():
        at -= tensor.numel
        if tensor.numel <= _SAMPLE:
            _check(file, weights, flats[MASTER], at, name, tensor)
        for state, flat in flats.items():
            if state == MASTER and tensor.dtype == "F32":
                continue  # the weight itself
            source = TorchSource(file, flat, at)
            yield FlatPart(name, state, 0, tensor.numel, flat.dtype, source), tensor.shape


def _check(
    file: TorchFile, weights: TorchFile, flat: TensorRef, at: int, name: str, tensor: TensorRef
) -> None:
    """IndexedError unless the fp32 parameter rounds to the weight."""
    weight = weights.read(tensor).reshape(-1)
    master = TorchSource(file, flat, at).read(0, tensor.numel)
    if master.astype(weight.dtype).tobytes() != weight.tobytes():
        raise IndexedError(
            f"{FILE} does not lie in the order of the model: '{name}' does not round to its weight"
        )
