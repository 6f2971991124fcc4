"""Hugging Face folders, read: ``config.json``, safetensors or ``pytorch_model.bin``, companions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt import companions
from mds_ckpt.checkpoint import (
    Checkpoint,
    ComputedTensor,
    LazyTensor,
    PiecedTensor,
    Source,
    StoredPiece,
)
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.escape import printable
from mds_ckpt.files.regular_file import name_fault
from mds_ckpt.files.safetensors_file import SafetensorsFile, StoredTensor
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.plan import Options, Plan
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.tensors.box import whole

if TYPE_CHECKING:
    from mds_ckpt.checkpoint import Array
    from mds_ckpt.families import Family
    from mds_ckpt.families.rule import Rule
    from mds_ckpt.pickles.archive import TorchFile
    from mds_ckpt.pickles.records import TensorRef

INDEX_NAME = "model.safetensors.index.json"
_AGAIN = "download the model again"


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model's files, before it has a canonical name."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    source: Source


_WEIGHT_FILES = (
    "model.safetensors",
    INDEX_NAME,
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which they are preferred."""


def detect(path: Path) -> bool:
    """Whether it is a folder with ``config.json`` and weights as transformers names them."""
    return (path / "config.json").is_file() and any(
        (path / name).is_file() for name in _WEIGHT_FILES
    )


def open_huggingface(path: Path, options: ReadOptions | None = None) -> Checkpoint:
    """Open a model folder; tensors get canonical names and layouts when they are read."""
    refuse_read_options(options, "hf")
    from mds_ckpt.families import UNLIKE, family_of

    config = companions.read_json(path / "config.json")
    model_type = str(config.get("model_type"))
    family = family_of(model_type)
    if family is None:
        raise UnsupportedError(
            path / "config.json",
            UNLIKE.get(model_type)
            or f"model_type '{printable(model_type)}' is of no family that we map",
            remedy="`mds-ckpt inspect` of its model.safetensors lists the tensors as they are",
        )
    if "quantization_config" in config:
        raise UnsupportedError(
            path / "config.json",
            "its weights are quantized",
            remedy="dequantize the model with the library that quantized it",
        )
    try:
        model = family.from_hf_config(config)
    except ValueError as error:
        raise UnsupportedError(
            path / "config.json", str(error), remedy="this model can't be carried over unchanged"
        ) from None
    found, notes = _stored_tensors(path)
    stored = _spelled(family, found)
    model = family.present(model, stored.keys())
    tensors = _canonical(path, family, family.rules(model), stored, notes)
    return Checkpoint(
        path=path,
        format="hf",
        model=model,
        states={"weight": tensors},
        companions=companions.find(path),
        origin={"huggingface": config},
        notes=tuple(notes),
    )


# The files' own tensors --------------------------------------------------------------------------


def _stored_tensors(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    present = [name for name in _WEIGHT_FILES if (folder / name).is_file()]
    if not present:
        raise RejectedError(folder, "it has no weights", remedy=_AGAIN)
    chosen, others = present[0], present[1:]
    notes = [f"{chosen} was read, {' and '.join(others)} was not"] if others else []
    if not chosen.endswith(".json"):
        return _read_file(folder / chosen), notes
    weight_map = _weight_map(folder / chosen)
    tensors: dict[str, Stored] = {}
    for name in sorted(set(weight_map.values())):
        found = _read_file(folder / name)
        for key in found.keys() & tensors.keys():
            raise RejectedError(folder / name, "it stands in two files", remedy=_AGAIN, tensor=key)
        tensors |= found
    for key, name in weight_map.items():
        if key not in tensors or tensors[key].path.name != name:
            raise RejectedError(
                folder / name, "the index names it and the file lacks it", remedy=_AGAIN, tensor=key
            )
    return tensors, notes


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = companions.read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise RejectedError(path, "it has no object 'weight_map'", remedy=_AGAIN)
    for key, name in weight_map.items():
        fault = "is not a string" if not isinstance(name, str) else name_fault(name)
        if fault is not None:
            raise RejectedError(
                path,
                f"file name '{printable(str(name))}' {fault}",
                remedy="a model's files lie in its own folder",
                tensor=key,
            )
    return weight_map


def _read_file(path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
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
    return _read_torch_file(path)


def _read_torch_file(path: Path) -> dict[str, Stored]:
    from mds_ckpt.pickles.archive import open_torch_file
    from mds_ckpt.pickles.records import TensorRef

    file = open_torch_file(path)
    if not isinstance(file.value, Mapping):
        raise RejectedError(path, "it does not hold a dictionary of tensors", remedy=_AGAIN)
    tensors = {}
    for name, value in file.value.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            raise RejectedError(path, "it is not a tensor", remedy=_AGAIN, tensor=str(name))
        tensors[name] = Stored(path, value.dtype, value.shape, _TorchSource(file, value))
    return tensors


@dataclass(frozen=True, slots=True)
class _TorchSource:
    file: TorchFile
    tensor: TensorRef

    def read(self, start: int, stop: int) -> Array:
        return self.file.read(self.tensor, start=start, stop=stop).reshape(-1)


# Their canonical names ---------------------------------------------------------------------------


def _spelled(family: Family, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors with old spellings of their names put right."""
    spelled: dict[str, Stored] = {}
    for name, part in stored.items():
        new = name
        for pattern, replacement in family.renamed:
            new = re.sub(pattern, replacement, new)
        if new in spelled:
            raise RejectedError(part.path, "it has two names there", remedy=_AGAIN, tensor=new)
        spelled[new] = part
    return spelled


def _stored_name(family: Family, first: str, stored: Mapping[str, Stored]) -> Callable[[str], str]:
    """From a rule's name to that in the files: a base model alone may lack or have the prefix."""
    prefix = family.prefix
    if first in stored or not prefix:
        return lambda name: name
    if first.startswith(prefix):
        return lambda name: name.removeprefix(prefix)
    return lambda name: prefix + name


def _canonical(
    folder: Path,
    family: Family,
    rules: Sequence[Rule],
    stored: Mapping[str, Stored],
    notes: list[str],
) -> dict[str, LazyTensor]:
    """Every rule's tensor; what else is stored is named in ``notes``, or refused."""
    stored_name = _stored_name(family, rules[0].hf[0].name, stored)
    unused = dict(stored)
    tensors = {}
    for rule in rules:
        parts = []
        for target in rule.hf:
            part = unused.pop(stored_name(target.name), None)
            if part is None:
                raise RejectedError(folder, "it is missing", remedy=_AGAIN, tensor=target.name)
            if part.shape != target.shape:
                raise RejectedError(
                    part.path,
                    f"it has shape {list(part.shape)} where config.json gives {list(target.shape)}",
                    remedy="correct config.json, it does not describe these weights",
                    tensor=target.name,
                )
            parts.append(part)
        tensors[rule.canonical.name] = _tensor(rule, parts)
    notes.extend(_account(folder, family, unused, tensors))
    return tensors


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
    return rule.change.to_canonical(*(_whole(part) for part in parts))


def _whole(part: Stored) -> Array:
    count = 1
    for extent in part.shape:
        count *= extent
    return part.source.read(0, count).reshape(part.shape)


def _account(
    folder: Path, family: Family, unused: Mapping[str, Stored], tensors: Mapping[str, LazyTensor]
) -> Iterator[str]:
    """Sentences on tensors that no rule uses; RejectedError if one of them holds weights."""
    for name, part in unused.items():
        if any(re.fullmatch(pattern, name) for pattern in family.ignored):
            yield f"{printable(name)} was dropped: it is a constant, not a weight"
        elif name in family.tied and _is_equal(part, tensors.get(family.tied[name])):
            yield f"{name} was dropped: it is {family.tied[name]} again"
        else:
            raise RejectedError(
                part.path,
                f"no {family.name} has it",
                remedy="correct config.json, or remove the tensor from the file",
                tensor=name,
            )


def _is_equal(part: Stored, twin: LazyTensor | None) -> bool:
    """Whether a tensor that should not be stored equals its twin, byte for byte."""
    if twin is None or (part.dtype, part.shape) != (twin.dtype, twin.shape):
        return False
    return bool(_whole(part).tobytes() == twin.numpy().tobytes())


def _plan(checkpoint: Checkpoint, options: Options) -> Plan:
    from mds_ckpt.writers.huggingface import plan

    return plan(checkpoint, options)


FORMAT = Format(
    name="hf",
    title="Hugging Face model folder",
    detect=detect,
    open=open_huggingface,
    plan=_plan,
)
