"""Which apex, if any, this machine has, found without importing it into this process.

PyPI's package of that name is a web toolkit that has nothing to do with NVIDIA's, and NVIDIA's may
lack its compiled parts or have been built for another torch. Each is a state of its own.
"""

import functools
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["ApexReport", "ApexState", "inspect_apex", "why_not_apex"]

ApexState = Literal["absent", "wrong-package", "python-only", "partial", "abi-broken", "ok"]

EXTENSIONS = ("amp_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda")
"""The compiled parts that training code uses; top-level modules, so they are found unimported."""

_NVIDIA_FOLDERS = ("normalization", "multi_tensor_apply", "optimizers")
_IMPORT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class ApexReport:
    """One of six states, and a sentence that says how it shows."""

    state: ApexState
    reason: str
    path: str | None = None
    missing: tuple[str, ...] = ()
    """Compiled parts that are not installed."""


@functools.cache
def inspect_apex() -> ApexReport:
    """Return the state of this interpreter's apex; found once a process."""
    folder = _apex_folder()
    if folder is None:
        return ApexReport("absent", "no apex is installed")
    path = str(folder)
    if not any((folder / name).is_dir() for name in _NVIDIA_FOLDERS) or _is_web_toolkit():
        return _without_nvidia_parts(path)
    missing = tuple(name for name in EXTENSIONS if importlib.util.find_spec(name) is None)
    if len(missing) == len(EXTENSIONS):
        return ApexReport(
            "python-only", f"apex at {path} was built without its CUDA parts", path, missing
        )
    present = [name for name in EXTENSIONS if name not in missing]
    if error := _import_error("torch", *present, "apex"):
        return ApexReport("abi-broken", f"apex at {path} can't be imported: {error}", path, missing)
    if missing:
        lacks = f"apex at {path} lacks {', '.join(missing)}"
        return ApexReport("partial", lacks, path, missing)
    return ApexReport("ok", f"NVIDIA apex at {path}, all parts load", path)


def why_not_apex(extension: str) -> str | None:
    """Return why a compiled part of this machine's apex can't be used, or None."""
    report = inspect_apex()
    if report.state == "ok" or (report.state == "partial" and extension not in report.missing):
        return None
    return report.reason


def _apex_folder() -> Path | None:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else Path(spec.origin or "apex.py")


def _without_nvidia_parts(path: str) -> ApexReport:
    if not _is_web_toolkit() and (error := _import_error("apex")):
        return ApexReport("abi-broken", f"apex at {path} can't be imported: {error}", path)
    return ApexReport(
        "wrong-package",
        f"apex found at {path} is not NVIDIA apex; uninstall it if nothing else needs it",
        path,
    )


def _is_web_toolkit() -> bool:
    """Tell PyPI's package by what it depends on."""
    try:
        requirements = importlib.metadata.requires("apex") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(line.lower().startswith(("pyramid", "velruse")) for line in requirements)


def _import_error(*modules: str) -> str | None:
    """Import in a process of its own and return the last line of the error, or None."""
    command = [sys.executable, "-c", f"import {', '.join(modules)}"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_IMPORT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the import did not end within {_IMPORT_SECONDS} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
