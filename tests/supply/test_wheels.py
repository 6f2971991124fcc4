"""A wheel is the same bytes wherever and whenever it is built; it carries its bill of materials."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from sbom import PACKAGES, ROOT, bill_path, bill_text, project

needs_backend = pytest.mark.skipif(
    find_spec("hatchling") is None, reason="builds wheels with hatchling: nox -s audit"
)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_bill_of_materials_is_what_the_package_declares(package: str) -> None:
    fresh = bill_path(package).read_text() == bill_text(package)

    assert fresh, "dependencies changed: run python tests/supply/sbom.py and commit the file"


def copy_of(package: str, folder: Path, *, date: int) -> Path:
    """Copy a package's tracked kinds of files, every one with another date."""
    skipped = shutil.ignore_patterns("__pycache__", "*.pyc", "dist", ".pytest_cache", ".hypothesis")
    target = shutil.copytree(ROOT / "packages" / package, folder / package, ignore=skipped)
    for path in [target, *target.rglob("*")]:
        os.utime(path, (date, date))
    return target


def build(source: Path, *, kind: str, out: Path, umask: int) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    subprocess.run(command, cwd=source, umask=umask, check=True, capture_output=True)
    (built,) = out.iterdir()
    return built


@needs_backend
@pytest.mark.parametrize("package", PACKAGES)
def test_two_builds_in_other_folders_and_years_are_equal(package: str, tmp_path: Path) -> None:
    first = copy_of(package, tmp_path / "a", date=1_000_000_000)
    second = copy_of(package, tmp_path / "another-folder", date=1_700_000_000)

    wheels = [
        build(first, kind="wheel", out=tmp_path / "1", umask=0o022),
        build(second, kind="wheel", out=tmp_path / "2", umask=0o077),
    ]

    digests = {hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    assert len(digests) == 1


@needs_backend
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_built_from_the_source_distribution_is_the_same(
    package: str, tmp_path: Path
) -> None:
    source = copy_of(package, tmp_path / "tree", date=1_000_000_000)
    archive = build(source, kind="sdist", out=tmp_path / "sdist", umask=0o022)
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    direct = build(source, kind="wheel", out=tmp_path / "1", umask=0o022)
    detour = build(unpacked, kind="wheel", out=tmp_path / "2", umask=0o022)

    assert direct.read_bytes() == detour.read_bytes()


@needs_backend
@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_a_valid_bill_of_materials(package: str, tmp_path: Path) -> None:
    schema = pytest.importorskip("cyclonedx.schema")
    validation = pytest.importorskip("cyclonedx.validation.json")
    wheel = build(
        copy_of(package, tmp_path / "a", date=1), kind="wheel", out=tmp_path / "1", umask=0
    )

    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/sboms/" in name]
        (text,) = [archive.read(name).decode() for name in names]

    checker = validation.JsonStrictValidator(schema.SchemaVersion.V1_7)
    assert checker.validate_str(text) is None
    assert json.loads(text)["metadata"]["component"]["version"] == project(package)["version"]
