"""Whether Triton can compile and run here; found without importing it."""

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

_INTERPRETER = "TRITON_INTERPRET"
_OLDEST = (8, 0)


def why_not(device: str, environment: Mapping[str, str]) -> str | None:
    """Return why Triton's kernels can't run on a device type of this machine, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (torch's CUDA builds bring it)"
    if device == "cpu":
        if environment.get(_INTERPRETER) == "1":
            return None
        return f"it runs on cuda; on cpu it is only interpreted, for tests ({_INTERPRETER}=1)"
    if device != "cuda":
        return f"it runs on cuda, not on {device}"
    return _no_device() or _no_compiler(environment) or _no_cache(environment)


def _no_device() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if torch.version.hip is None and capability < _OLDEST:
        return f"the GPU is sm_{capability[0]}{capability[1]}; the kernels want sm_80 or newer"
    return None


def _no_compiler(environment: Mapping[str, str]) -> str | None:
    """Triton compiles a stub in C for each kernel that it launches."""
    if environment.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc"))):
        return None
    return "it needs a C compiler at run time: install gcc or clang, or set CC"


def _no_cache(environment: Mapping[str, str]) -> str | None:
    home = environment.get("TRITON_HOME") or str(Path.home())
    folder = Path(environment.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if os.access(existing, os.W_OK):
        return None
    return f"it can't write to {existing}, where it keeps compiled kernels: set TRITON_CACHE_DIR"
