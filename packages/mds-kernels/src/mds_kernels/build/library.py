"""Find a built library that fits this machine, and load it once."""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from mds_kernels.build.compiler import Build, read_build, too_old_torch
from mds_kernels.build.recipe import cache_folder, recipe_for

__all__ = ["builds", "find_library", "load_library", "why_no_library"]


def why_no_library(device: str, environment: Mapping[str, str]) -> str | None:
    """Return why the compiled kernels of a device can't be used, or None."""
    if reason := too_old_torch():
        return reason
    built = builds(device, environment)
    if not built:
        return f"not built on this machine: mds-kernels build --device {device}"
    if find_library(device, environment) is None:
        there = ", ".join(".".join(one.architectures) for one in built)
        return f"built for {there}, which does not run here: mds-kernels build --device {device}"
    return None


def find_library(device: str, environment: Mapping[str, str]) -> Build | None:
    """Return a library of today's sources that this machine's device runs, or None."""
    wanted = _wanted_architecture(device)
    fitting = [one for one in builds(device, environment) if _runs(one, device, wanted)]
    return fitting[0] if fitting else None


@functools.cache
def load_library(path: str) -> None:
    """Load a library into this process; its ops appear under ``torch.ops.mds_kernels``."""
    torch.ops.load_library(path)  # type: ignore[no-untyped-call]


def builds(device: str, environment: Mapping[str, str]) -> list[Build]:
    """Return the libraries of today's sources for a device."""
    prefix = recipe_for(device).prefix
    folders = sorted(cache_folder(environment).glob(f"{prefix}*"))
    found = [read_build(folder) for folder in folders if _is_whole(folder)]
    return [one for one in found if one is not None]


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and ".partial-" not in folder.name


def _wanted_architecture(device: str) -> str | None:
    if device == "cpu":
        return recipe_for("cpu").architectures[0]
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{major}{minor}"


def _runs(built: Build, device: str, wanted: str | None) -> bool:
    if wanted is None:
        return False
    if device == "cpu":
        return wanted in built.architectures
    numbers = [int(one) for one in built.architectures]
    # Machine code runs on its own and later minor versions; the newest is there as PTX too.
    same_major = any(one // 10 == int(wanted) // 10 and one <= int(wanted) for one in numbers)
    return same_major or max(numbers) < int(wanted)
