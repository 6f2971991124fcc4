"""The files of a DeepSpeed checkpoint folder, told apart by their names, and what is missing.

``mp_rank_MM`` counts model-parallel ranks (pipeline stage times tensor-parallel size plus
tensor-parallel rank); ``zero_pp_rank_D`` counts data-parallel ranks, despite its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import name_fault, read_whole

__all__ = ["Listing", "list_folder", "resolve_folder", "step_of"]

MOST_ENTRIES = 1_000_000
_NUMBER = r"(\d{1,6})"
_KINDS: Mapping[str, re.Pattern[str]] = {
    "layers": re.compile(rf"layer_{_NUMBER}-model_{_NUMBER}-model_states\.pt"),
    "models": re.compile(rf"mp_rank_{_NUMBER}_model_states\.pt"),
    "stage_3_models": re.compile(rf"zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt"),
    "optimizers": re.compile(
        rf"(?:bf16_|fp16_)?zero_pp_rank_{_NUMBER}_mp_rank_{_NUMBER}_?optim_states\.pt"
    ),
    "experts": re.compile(
        rf"(?:layer_{_NUMBER}_)?expert_{_NUMBER}_mp_rank_{_NUMBER}_model_states\.pt"
    ),
    "expert_optimizers": re.compile(rf"expp_rank_{_NUMBER}_mp_rank_{_NUMBER}_optim_states\.pt"),
}
_STEP = re.compile(r"global_step(\d{1,15})(_universal)?")


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of one checkpoint by kind; keys are the numbers in their names."""

    folder: Path
    layers: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By pipeline layer and tensor-parallel rank."""
    models: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By model-parallel rank."""
    stage_3_models: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By data-parallel and model-parallel rank."""
    optimizers: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By data-parallel and model-parallel rank."""
    experts: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By number of the MoE layer (-1 in old files), expert, and model-parallel rank."""
    expert_optimizers: dict[tuple[int, ...], Path] = field(default_factory=dict)
    """By expert-parallel and model-parallel rank, where there is no ZeRO."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing here is DeepSpeed's."""
        return not (self.layers or self.models or self.stage_3_models)


def list_folder(folder: Path) -> Listing:
    """Sort a folder's files by kind. Opens none of them.

    Raises:
        RejectedError: Two files claim to be the same rank's.
    """
    listing = Listing(folder)
    for name in _names(folder):
        for kind, pattern in _KINDS.items():
            match = pattern.fullmatch(name)
            if match is None:
                continue
            key = tuple(-1 if number is None else int(number) for number in match.groups())
            files: dict[tuple[int, ...], Path] = getattr(listing, kind)
            if key in files:
                raise RejectedError(
                    folder,
                    f"{files[key].name} and {name} are the same rank's",
                    remedy="remove the one that does not belong here",
                )
            files[key] = folder / name
    return listing


def _names(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for _, entry in zip(range(MOST_ENTRIES), entries, strict=False)]
    return iter(sorted(names))


def resolve_folder(path: Path, *, pointer: str = "latest") -> Path | None:
    """The folder with the files: ``path``, or the step that its ``latest`` names.

    Args:
        path: A step's folder or the folder of steps.
        pointer: Name of the text file that names the newest step.

    Returns:
        The folder, or None if neither is there.

    Raises:
        RejectedError: The pointer leads elsewhere, or to nothing.
    """
    if not (path / pointer).is_file() and not (path / pointer).is_symlink():
        return None
    text = read_whole(path / pointer, limit=4096).decode("utf-8", "replace").strip()
    fault = name_fault(text)
    if fault is not None:
        raise RejectedError(
            path / pointer,
            f"the name that it gives {fault}",
            remedy="write the name of a step's folder into it, such as global_step100",
        )
    folder = path / text
    if folder.is_symlink() or not folder.is_dir():
        raise RejectedError(
            path / pointer,
            f"it names '{text}', which is no folder here",
            remedy="name the step's folder itself",
        )
    return folder


def newest_step(path: Path) -> Path | None:
    """The step folder with the highest number, where no file says which is the newest."""
    steps = [
        (number, path / name) for name in _names(path) if (number := step_of(name)) is not None
    ]
    folders = [(number, step) for number, step in steps if step.is_dir() and not step.is_symlink()]
    return max(folders)[1] if folders else None


def step_of(name: str) -> int | None:
    """The number in a step folder's name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None
