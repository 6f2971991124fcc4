"""Hugging Face folders, read: ``config.json``, safetensors or ``pytorch_model.bin``, companions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt import companions
from mds_ckpt.checkpoint import Checkpoint, LazyTensor
from mds_ckpt.errors import RejectedError, UnsupportedError
from mds_ckpt.escape import printable
from mds_ckpt.files.regular_file import name_fault
from mds_ckpt.formats import Format, refuse_read_options
from mds_ckpt.plan import Options, Plan
from mds_ckpt.read_options import ReadOptions
from mds_ckpt.stored import Stored, canonical_tensors, read_safetensors, read_torch, values

if TYPE_CHECKING:
    from mds_ckpt.families import Family
    from mds_ckpt.families.rule import Rule

INDEX_NAME = "model.safetensors.index.json"
_AGAIN = "download the model again"


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
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)


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
    tensors, unused = canonical_tensors(
        folder,
        rules,
        stored,
        config_name="config.json",
        stored_name=_stored_name(family, rules[0].hf[0].name, stored),
    )
    notes.extend(_account(folder, family, unused, tensors))
    return tensors


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
    return bool(values(part).tobytes() == twin.numpy().tobytes())


def _plan(checkpoint: Checkpoint, options: Options) -> Plan:
    from mds_ckpt.writers import huggingface, own_names

    if checkpoint.model.family == "unknown":
        return own_names.plan(checkpoint, options)
    return huggingface.plan(checkpoint, options)


FORMAT = Format(
    name="hf",
    title="Hugging Face model folder",
    detect=detect,
    open=open_huggingface,
    plan=_plan,
)
