"""A build needs no torch, no compiler and no sibling, and installed packages share no file."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from sbom import PACKAGES, ROOT

needs_backend = pytest.mark.skipif(
    find_spec("hatchling") is None, reason="builds wheels with hatchling: nox -s audit"
)
needs_nox = pytest.mark.skipif(find_spec("nox") is None, reason="nox is not installed here")


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch fails and no compiler is found."""
    poison = tmp_path / "poison"
    poison.mkdir()
    for name in ("torch", "mds_kernels", "mds_core", "mds_data", "mds_ckpt", "mds_train"):
        (poison / f"{name}.py").write_text(f"raise ImportError('{name} is not here')\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    return {"PYTHONPATH": str(poison), "PATH": str(empty), "HOME": str(tmp_path)}


def wheel_of(package: str, out: Path, environment: dict[str, str]) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    folder = ROOT / "packages" / package
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@needs_backend
def test_wheels_are_built_without_torch_and_share_no_file(
    tmp_path: Path, bare: dict[str, str]
) -> None:
    owners: dict[str, str] = {}
    for package in PACKAGES:
        wheel = wheel_of(package, tmp_path / package, bare)

        assert wheel.name.endswith("-py3-none-any.whl")
        names = zipfile.ZipFile(wheel).namelist()
        tops = {name.split("/")[0] for name in names}
        module = package.replace("-", "_")
        assert {top for top in tops if not top.endswith(".dist-info")} == {module}
        for name in names:
            assert owners.setdefault(name, package) == package


@needs_nox
def test_the_sessions_are_listed_without_torch(bare: dict[str, str]) -> None:
    environment = {**bare, "PATH": os.environ["PATH"]}
    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list", "-f", str(ROOT / "noxfile.py")],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )

    assert listed.returncode == 0, listed.stderr
    assert "alone" in listed.stdout
