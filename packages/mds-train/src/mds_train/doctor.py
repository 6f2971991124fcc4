"""What this machine offers and what stands in a run's way. Looks only; changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PACKAGES", "Finding", "examine", "shared_memory_leftovers", "stale_locks"]

PACKAGES = (
    "mds-train",
    "mds-parallel-core",
    "mds-kernels",
    "mds-data",
    "mds-ckpt",
    "torch",
    "deepspeed",
    "numpy",
    "tokenizers",
    "tensorboard",
    "triton",
)

_SHARED_MEMORY = Path("/dev/shm")
_LEFTOVER = "deepspeed_allreduce_buffer_*"
_STALE_SECONDS = 600
_LOW_DISK = 5 * 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    text: str
    remedy: str = ""
    """What to do; empty where all is well."""

    @property
    def is_problem(self) -> bool:
        """Whether a person should act."""
        return bool(self.remedy)


def examine(*, extensions: Path, cores: int, folder: Path) -> list[Finding]:
    """Look at versions, devices, kernels, locks, shared memory and disk.

    Args:
        extensions: folder of compiled extensions.
        cores: CPU cores that this process may use.
        folder: where runs will be written.
    """
    return [
        _system(cores),
        *_versions(),
        *_devices(),
        *_kernels(),
        *_locks(extensions),
        *_shared_memory(),
        _disk(folder),
    ]


def stale_locks(extensions: Path, *, now: float, age: float = _STALE_SECONDS) -> list[Path]:
    """List build locks older than ``age`` seconds; a killed build leaves one, and the next waits.

    Args:
        extensions: folder of compiled extensions.
        now: the time, in seconds since 1970.
        age: seconds after which a build is no longer believed to run.
    """
    locks = extensions.glob("**/lock") if extensions.is_dir() else ()
    return sorted(lock for lock in locks if now - lock.stat().st_mtime > age)


def shared_memory_leftovers(folder: Path = _SHARED_MEMORY) -> list[Path]:
    """List DeepSpeed's shared-memory buffers; killed runs leave about 69 MB a rank."""
    return sorted(folder.glob(_LEFTOVER)) if folder.is_dir() else []


def _system(cores: int) -> Finding:
    text = f"Python {platform.python_version()} on {platform.platform()}, {cores} CPU cores"
    memory = _memory()
    return Finding(subject="system", text=f"{text}, {memory}" if memory else text)


def _memory() -> str:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return ""
    return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB memory"


def _versions() -> Iterable[Finding]:
    for package in PACKAGES:
        try:
            yield Finding(subject=package, text=importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            optional = package == "triton"
            remedy = "" if optional else f"pip install {package}"
            text = "not installed (only GPUs need it)" if optional else "not installed"
            yield Finding(subject=package, text=text, remedy=remedy)


def _devices() -> Iterable[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding(subject="devices", text="no accelerator; runs use the CPU with gloo")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        yield Finding(subject=f"cuda:{index}", text=text)


def _kernels() -> Iterable[Finding]:
    import torch

    from mds_kernels.dispatch import why
    from mds_kernels.registry import OPS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for op in OPS:
        choice = why(op, device=device)
        text = f"{choice.backend} on {choice.device} ({choice.reason})"
        yield Finding(subject=f"kernel {op}", text=text)


def _locks(extensions: Path) -> Iterable[Finding]:
    found = stale_locks(extensions, now=time.time())
    for lock in found:
        yield Finding(
            subject="stale lock",
            text=f"{lock}: a killed build left it and the next build would wait for ever",
            remedy=f"if nothing is building: rm {lock}",
        )
    if not found:
        yield Finding(subject="build locks", text=f"none in {extensions}")


def _shared_memory() -> Iterable[Finding]:
    found = shared_memory_leftovers()
    if not found:
        yield Finding(subject="shared memory", text=f"no leftovers in {_SHARED_MEMORY}")
        return
    size = sum(path.stat().st_size for path in found) / 2**20
    yield Finding(
        subject="shared memory",
        text=f"{len(found)} DeepSpeed buffers of killed runs hold {size:.0f} MiB",
        remedy=f"if no DeepSpeed run is going on: rm {_SHARED_MEMORY}/{_LEFTOVER}",
    )


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free in {folder.resolve()}"
    remedy = "free some space: checkpoints need it" if free < _LOW_DISK else ""
    return Finding(subject="disk", text=text, remedy=remedy)
