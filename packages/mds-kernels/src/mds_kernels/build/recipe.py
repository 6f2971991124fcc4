"""What is compiled, with which flags, and under which name the result is found again.

A library is named by its sources, torch's stable ABI and the architectures, so a change of any of
them is another library, and a torch upgrade within the ABI is not.
"""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DEFAULT_ARCHITECTURES", "DEVICES", "Recipe", "cache_folder", "recipe_for"]

DEVICES = ("cuda", "cpu")
DEFAULT_ARCHITECTURES = ("80", "90", "100")

ABI = "2.13"
"""The torch whose stable ABI is asked for: a later torch loads the library too."""
ABI_NUMBER = "0x020d000000000000"

_SOURCES = Path(__file__).parents[1] / "csrc"
_MAIN = {"cuda": "cuda/library.cu", "cpu": "cpu/library.cpp"}
_CPU_FLAGS = {"AVX512": ("-march=x86-64-v4",), "AVX2": ("-march=x86-64-v3",)}
# What -ffast-math would do to sums, without what it does to NaN and to the whole process.
_MATH = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One library to be."""

    device: str
    architectures: tuple[str, ...]
    """For cuda "80", "90"...; for cpu the instruction set that torch found."""

    @property
    def name(self) -> str:
        """The folder of the library inside the cache."""
        return f"{self.prefix}{'.'.join(self.architectures)}"

    @property
    def prefix(self) -> str:
        """The beginning of the names of all libraries of these sources for this device."""
        return f"{self.device}-{_digest(self.device)}-"

    @property
    def library(self) -> str:
        """The name of the shared library."""
        return f"libmds_kernels_{self.device}.so"

    def command(self, *, compiler: str, output: Path) -> list[str]:
        """Return the compiler's command line."""
        include = Path(torch.__file__).parent
        return [
            compiler,
            "-std=c++20",
            "-O3",
            "-shared",
            *self._flags(),
            f"-DTORCH_TARGET_VERSION={ABI_NUMBER}",
            f"-I{_SOURCES / 'include'}",
            f"-I{include / 'include'}",
            str(_SOURCES / _MAIN[self.device]),
            "-o",
            str(output),
            f"-L{include / 'lib'}",
            "-ltorch_cpu",
        ]

    def _flags(self) -> list[str]:
        if self.device == "cpu":
            return ["-fPIC", *_MATH, *_CPU_FLAGS.get(self.architectures[0], ())]
        codes = [f"-gencode=arch=compute_{one},code=sm_{one}" for one in self.architectures]
        newest = max(self.architectures, key=int)
        # The newest also as PTX, which the driver compiles for a GPU that is newer still.
        codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
        return ["-Xcompiler", "-fPIC", "-cudart=static", "-DUSE_CUDA", "-Xptxas=-v", *codes]


def recipe_for(device: str, *, architectures: tuple[str, ...] = DEFAULT_ARCHITECTURES) -> Recipe:
    """Return the recipe for a device; architectures are for cuda, a cpu has its own."""
    if device == "cpu":
        architectures = (torch.backends.cpu.get_cpu_capability(),)
    return Recipe(device=device, architectures=architectures)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder that holds this user's libraries."""
    if given := environment.get("MDS_KERNELS_BUILD_DIR"):
        return Path(given)
    cache = environment.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "mds-kernels"


@functools.cache
def _digest(device: str) -> str:
    """Return what changes with the sources, the ABI and the flags."""
    digest = hashlib.sha256(f"{device} {ABI} {_MATH} {_CPU_FLAGS}".encode())
    for path in sorted(_SOURCES.rglob("*.*")):
        if path.parent.name in ("include", device):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
