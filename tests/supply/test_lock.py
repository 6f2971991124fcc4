"""The lock of CI holds what the sessions ask for, each package with hashes."""

from __future__ import annotations

import re

from lock import LOCK, TORCH_LOCK, inputs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from sbom import ROOT

PIN = re.compile(r"^([a-z0-9-]+)==([^ ]+)", flags=re.MULTILINE)


def pins() -> dict[str, set[Version]]:
    found: dict[str, set[Version]] = {}
    for text in (LOCK.read_text(), TORCH_LOCK.read_text()):
        for name, version in PIN.findall(text):
            found.setdefault(name, set()).add(Version(version))
    return found


def test_every_requirement_of_the_sessions_is_pinned_to_a_version_that_it_accepts() -> None:
    locked = pins()

    missing = [
        line
        for line in inputs()
        for asked in [Requirement(line)]
        if not any(
            asked.specifier.contains(version, prereleases=True)
            for version in locked.get(canonicalize_name(asked.name), ())
        )
    ]

    assert missing == [], "run python tests/supply/lock.py and commit the files"


def test_the_lock_agrees_with_the_tested_versions() -> None:
    locked = pins()
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]

    differing = [
        str(asked)
        for asked in tested
        if canonicalize_name(asked.name) in locked
        and not all(map(asked.specifier.contains, locked[canonicalize_name(asked.name)]))
    ]

    assert differing == [], "run python tests/supply/lock.py and commit the files"


def test_every_pin_has_hashes() -> None:
    for path in (LOCK, TORCH_LOCK):
        entries = path.read_text().replace("\\\n", " ").splitlines()[1:]

        assert [line for line in entries if "--hash=sha256:" not in line] == []
