"""Tensors of a model's files under their own names, and canonical ones made of them by rules.

Formats that hold whole tensors share this: each says where its files are, which model they hold,
and by which rules names and shapes turn into ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt.checkpoint import ComputedTensor, LazyTensor, PiecedTensor, Source, StoredPiece
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.safetensors_file import SafetensorsFile, StoredTensor
from mds_ckpt.tensors.box import whole

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array
    from mds_ckpt.families.rule import Rule
    from mds_ckpt.pickles.archive import TorchFile
    from mds_ckpt.pickles.records import TensorRef

__all__ = [
    "Stored",
    "canonical_tensors",
    "read_safetensors",
    "read_torch",
    "torch_tensors",
    "values",
]

AGAIN = "get the file again from its source"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model's files, before it has a canonical name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    source: Source


def read_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file; its header is checked, no data is read."""
    file = SafetensorsFile(path, cache_links=True)
    return {
        name: Stored(
            path,
            entry.dtype,
            entry.shape,
            StoredTensor(file, name, dtype=entry.dtype, shape=entry.shape),
        )
        for name, entry in file.header.entries.items()
    }


def read_torch(path: Path) -> dict[str, Stored]:
    """The tensors of a torch file that holds a dictionary of nothing else."""
    from mds_ckpt.pickles.archive import open_torch_file

    file = open_torch_file(path)
    return torch_tensors(file, file.value)


def torch_tensors(file: TorchFile, value: object) -> dict[str, Stored]:
    """The tensors of a dictionary in a torch file; RejectedError if it holds anything else."""
    from mds_ckpt.pickles.records import TensorRef

    if not isinstance(value, Mapping):
        raise RejectedError(file.path, "it does not hold a dictionary of tensors", remedy=AGAIN)
    tensors = {}
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorRef):
            raise RejectedError(file.path, "it is not a tensor", remedy=AGAIN, tensor=str(name))
        source = _TorchSource(file, tensor)
        tensors[name] = Stored(file.path, tensor.dtype, tensor.shape, source)
    return tensors


@dataclass(frozen=True, slots=True)
class _TorchSource:
    file: TorchFile
    tensor: TensorRef

    def read(self, start: int, stop: int) -> Array:
        return self.file.read(self.tensor, start=start, stop=stop).reshape(-1)


def canonical_tensors(
    folder: Path,
    rules: Sequence[Rule],
    stored: Mapping[str, Stored],
    *,
    config_name: str,
    stored_name: Callable[[str], str] = str,
) -> tuple[dict[str, LazyTensor], dict[str, Stored]]:
    """Every rule's tensor, and the stored ones that no rule uses.

    Args:
        folder: Where the model lies, for messages.
        rules: What the model consists of.
        stored: What its files hold.
        config_name: The file that gives the shapes, for messages.
        stored_name: From a rule's name to that in the files.

    Raises:
        RejectedError: A tensor is missing or has another shape.
    """
    unused = dict(stored)
    tensors = {}
    for rule in rules:
        parts = []
        for target in rule.hf:
            part = unused.pop(stored_name(target.name), None)
            if part is None:
                raise RejectedError(folder, "it is missing", remedy=AGAIN, tensor=target.name)
            if part.shape != target.shape:
                raise RejectedError(
                    part.path,
                    f"it has shape {list(part.shape)} where {config_name} gives "
                    f"{list(target.shape)}",
                    remedy=f"correct {config_name}, it does not describe these weights",
                    tensor=target.name,
                )
            parts.append(part)
        tensors[rule.canonical.name] = _tensor(rule, parts)
    return tensors, unused


def _tensor(rule: Rule, parts: Sequence[Stored]) -> LazyTensor:
    name, shape, dtype = rule.canonical.name, rule.canonical.shape, parts[0].dtype
    for part, target in zip(parts, rule.hf, strict=True):
        if part.dtype != dtype:
            raise RejectedError(
                part.path,
                f"it is {part.dtype} and its sister '{rule.hf[0].name}' is {dtype}",
                remedy="save the model in one type",
                tensor=target.name,
            )
    if len(parts) == 1 and parts[0].shape == shape and rule.is_same:
        pieces = [StoredPiece(whole(shape), None, parts[0].source)]
        return PiecedTensor(name, shape, dtype, pieces=pieces)
    return ComputedTensor(name, shape, dtype, compute=partial(_join, rule, tuple(parts)))


def _join(rule: Rule, parts: Sequence[Stored]) -> Array:
    return rule.change.to_canonical(*(values(part) for part in parts))


def values(part: Stored) -> Array:
    """All elements of a stored tensor, in its shape."""
    count = 1
    for extent in part.shape:
        count *= extent
    return part.source.read(0, count).reshape(part.shape)
