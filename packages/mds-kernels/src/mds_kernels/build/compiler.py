"""Find the compiler, run it, and publish what it made in one step."""

import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mds_kernels.build.lock import build_lock
from mds_kernels.build.recipe import ABI, Recipe
from mds_kernels.build.resources import KernelUsage, read_usage

__all__ = ["Build", "BuildError", "build", "find_compiler", "find_nvcc", "too_old_torch"]

_SHOWN = 2000  # characters of the compiler's complaint
REPORT = "report.json"


class BuildError(RuntimeError):
    """A library could not be built on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """A library that is there."""

    library: str
    device: str
    architectures: tuple[str, ...]
    compiler: str
    seconds: float
    """0 where it had been built before."""
    usage: tuple[KernelUsage, ...]
    """What each kernel takes of a GPU; empty for cpu."""


def build(recipe: Recipe, *, folder: Path, environment: Mapping[str, str], force: bool) -> Build:
    """Compile a library into ``folder`` unless it is there already.

    Raises:
        BuildError: There is no compiler, it fails, or torch is too old.
        OSError: The folder can't be written.
    """
    if reason := too_old_torch():
        raise BuildError(reason)
    if not force and (found := read_build(folder / recipe.name)):
        return found
    compiler = find_compiler(recipe.device, environment)
    with build_lock(folder / f"{recipe.name}.lock"):
        # Whoever held the lock before may have built it.
        if not force and (found := read_build(folder / recipe.name)):
            return found
        return _compile(recipe, compiler=compiler, folder=folder)


def read_build(folder: Path) -> Build | None:
    """Return the build in a folder, or None if there is no whole one."""
    try:
        told = json.loads((folder / REPORT).read_text())
    except (OSError, ValueError):
        return None
    library = folder / told["library"]
    if not library.exists():
        return None
    usage = tuple(KernelUsage(**row) for row in told["usage"])
    architectures = tuple(told["architectures"])
    return Build(
        **{**told, "library": str(library), "architectures": architectures, "usage": usage}
    )


def too_old_torch() -> str | None:
    """Return why this torch can't load the libraries, or None."""
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers >= tuple(int(part) for part in ABI.split(".")):
        return None
    return f"compiled kernels need torch {ABI} or newer; this is {torch.__version__}"


def find_compiler(device: str, environment: Mapping[str, str]) -> str:
    """Return the path of nvcc or of the C++ compiler.

    Raises:
        BuildError: There is none.
    """
    if device == "cuda":
        if found := find_nvcc(environment):
            return found
        raise BuildError(
            "there is no nvcc: set CUDA_HOME to a CUDA toolkit (13 or newer), put nvcc on PATH, or "
            "install its wheels: nvidia-cuda-nvcc, nvidia-cuda-runtime and nvidia-cuda-cccl."
        )
    for name in (environment.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("there is no C++ compiler: install g++ or clang++, or set CXX.")


def find_nvcc(environment: Mapping[str, str]) -> str | None:
    """Return the path of nvcc: of CUDA_HOME, on PATH, or in the wheels of NVIDIA; or None."""
    home = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if home and (found := shutil.which("nvcc", path=str(Path(home) / "bin"))):
        return found
    return shutil.which("nvcc") or _nvcc_of_wheels()


def _nvcc_of_wheels() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = [path for place in places for path in Path(place).glob("cu*/bin/nvcc")]
    return str(max(found)) if found else None


def _compile(recipe: Recipe, *, compiler: str, folder: Path) -> Build:
    for left in folder.glob(f"{recipe.name}.partial-*"):  # of a build that was killed
        shutil.rmtree(left)
    partial = folder / f"{recipe.name}.partial-{os.getpid()}"
    partial.mkdir()
    start = time.monotonic()
    try:
        command = recipe.command(compiler=compiler, output=partial / recipe.library)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(
                f"{compiler} ended with {done.returncode}: {done.stderr.strip()[-_SHOWN:]}"
            )
        result = Build(
            library=recipe.library,
            device=recipe.device,
            architectures=recipe.architectures,
            compiler=_version(compiler),
            seconds=round(time.monotonic() - start, 1),
            usage=read_usage(done.stderr),
        )
        (partial / REPORT).write_text(json.dumps(asdict(result), indent=2) + "\n")
        _publish(partial, folder / recipe.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    built = read_build(folder / recipe.name)
    assert built is not None
    return built


def _publish(partial: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def _version(compiler: str) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    lines = told.stdout.splitlines()
    release = [line for line in lines if "release" in line]
    return f"{compiler}: {(release or lines or ['unknown version'])[0].strip()}"
