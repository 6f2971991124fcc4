"""The repository's tree is the one that CONTRIBUTING.md describes, in every package alike."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("mds-kernels", "mds-core", "mds-data", "mds-ckpt", "mds-train")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/test_readme.py")
FOLDERS = ("changes", "src", "tests")


def project(package: str) -> dict[str, object]:
    return tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]


def test_there_are_five_packages() -> None:
    folders = {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()}

    assert folders == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_whole(package: str) -> None:
    folder, module = ROOT / "packages" / package, package.replace("-", "_")

    assert [name for name in FILES if not (folder / name).is_file()] == []
    assert [name for name in FOLDERS if not (folder / name).is_dir()] == []
    assert [path.name for path in (folder / "src").iterdir() if path.is_dir()] == [module]
    assert (folder / "src" / module / "py.typed").is_file()
    assert list((folder / "changes").glob("*.md")), "no changelog fragment"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_its_own_version_and_licence(package: str) -> None:
    settings = project(package)

    assert re.fullmatch(r"\d+\.\d+\.\d+", str(settings["version"]))
    assert settings["license"] == "Apache-2.0"
    assert settings["requires-python"] == ">=3.11"


def test_no_dependency_of_ours_can_be_a_strangers_upload() -> None:
    names = {str(project(package)["name"]) for package in PACKAGES}

    assert names == {"mds-kernels", "mds-parallel-core", "mds-data", "mds-ckpt", "mds-train"}


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_bound_to_a_minor_version(package: str) -> None:
    ours = [line for line in project(package)["dependencies"] if line.startswith("mds-")]

    assert [line for line in ours if not re.fullmatch(r"mds-[a-z-]+>=0\.\d+,<0\.\d+", line)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_depends_on_apex(package: str) -> None:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()

    assert "apex" not in text


def test_every_source_file_says_what_its_room_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in ROOT.glob("packages/*/src/**/*.py")
        if not path.read_text().lstrip().startswith(('"""', "r'''", 'r"""'))
    ]

    assert silent == []


def test_there_is_no_room_without_a_purpose() -> None:
    names = {"utils.py", "helpers.py", "misc.py", "common.py"}

    assert [path for path in ROOT.glob("packages/*/src/**/*.py") if path.name in names] == []
