"""What runs on this machine and why: versions, apex, the choice for each op, build locks."""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mds_kernels.apex_state import ApexReport, inspect_apex
from mds_kernels.build.compiler import find_nvcc
from mds_kernels.build.library import builds
from mds_kernels.build.lock import owner_of
from mds_kernels.build.recipe import DEVICES, cache_folder
from mds_kernels.build_lock import BuildLock, clear_stale, extensions_folder, find_locks
from mds_kernels.dispatch import BackendError, Choice, why
from mds_kernels.preference import unknown_variables
from mds_kernels.registry import OPS

__all__ = ["Diagnosis", "diagnose"]

_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_NOT_FOUND = "not found"


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that ``mds-kernels doctor`` tells."""

    versions: dict[str, str]
    apex: ApexReport
    choices: tuple[Choice, ...]
    locks: tuple[BuildLock, ...]
    cleared: tuple[BuildLock, ...]
    problems: tuple[str, ...]
    """What the user should change, one sentence each."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "versions": self.versions,
            "apex": asdict(self.apex),
            "ops": [asdict(choice) for choice in self.choices],
            "locks": [_lock_json(lock) for lock in self.locks],
            "cleared_locks": [_lock_json(lock) for lock in self.cleared],
            "problems": list(self.problems),
        }


def diagnose(environment: Mapping[str, str], *, clear_locks: bool = False) -> Diagnosis:
    """Look at this machine; remove stale build locks if asked to."""
    found = find_locks(extensions_folder(environment), now=time.time())
    remaining = clear_stale(found) if clear_locks else found
    choices, complaints = _choices()
    problems = [
        *complaints,
        *(f"{name} is set but names no op." for name in unknown_variables()),
        *(_lock_problem(lock) for lock in remaining if lock.stale),
    ]
    return Diagnosis(
        versions=_versions(environment),
        apex=inspect_apex(),
        choices=choices,
        locks=tuple(remaining),
        cleared=tuple(lock for lock in found if lock not in remaining),
        problems=tuple(problems),
    )


def _choices() -> tuple[tuple[Choice, ...], list[str]]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    choices, complaints = [], []
    for device in devices:
        for op in OPS:
            try:
                choices.append(why(op, device=device, dtype=_DTYPES[device]))
            except BackendError as error:
                complaints.append(str(error))
    # A wrong name in the environment is the same complaint for every op.
    return tuple(choices), list(dict.fromkeys(complaints))


def _versions(environment: Mapping[str, str]) -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "mds-kernels": _distribution("mds-kernels"),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none, a CPU build",
        "triton": _distribution("triton"),
        "nvcc": _nvcc(environment),
        "NVIDIA driver": _driver(),
        **{f"kernels for {one}": _built(one, environment) for one in DEVICES},
    }
    if torch.cuda.is_available():
        versions["architectures of torch"] = " ".join(torch.cuda.get_arch_list())
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            versions[f"GPU {index}"] = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"
    return versions


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return _NOT_FOUND


def _nvcc(environment: Mapping[str, str]) -> str:
    found = find_nvcc(environment)
    if found is None:
        return _NOT_FOUND
    try:
        told = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found}, which does not run: {error}"
    release = [line for line in told.stdout.splitlines() if "release" in line]
    return f"{found}, {release[0].strip() if release else 'version unknown'}"


def _built(device: str, environment: Mapping[str, str]) -> str:
    """Return what is compiled for a device, and who compiles just now."""
    folder = cache_folder(environment)
    owners = [owner_of(path) for path in folder.glob(f"{device}-*.lock")]
    busy = [f"being built by {owner}" for owner in owners if owner is not None]
    built = [
        f"{one.library} for {', '.join(one.architectures)}" for one in builds(device, environment)
    ]
    return "; ".join([*built, *busy]) or f"not built (mds-kernels build --device {device})"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return _NOT_FOUND


def _lock_problem(lock: BuildLock) -> str:
    return (
        f"{lock.path} is a build lock that no process holds, {lock.age_seconds / 3600:.1f} h old; "
        f"builds will wait for it for ever. Remove it: mds-kernels doctor --clear-stale-locks."
    )


def _lock_json(lock: BuildLock) -> dict[str, Any]:
    return {
        "path": str(lock.path),
        "age_seconds": round(lock.age_seconds),
        "pids": list(lock.holders),
        "stale": lock.stale,
    }
