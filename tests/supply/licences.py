"""Lists the licence of everything that our packages install, and refuses what does not fit.

    python tests/supply/licences.py             write docs/reference/dependency-licences.md
    python tests/supply/licences.py --check     say what does not fit, or is not in that list

Reads the metadata of the environment that it runs in, so it runs where all five packages and
their extras are installed: nox -s audit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from license_expression import ExpressionError, get_spdx_licensing
from lock import locked_extras
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sbom import PACKAGES, ROOT, project, requirements

PAGE = ROOT / "docs" / "reference" / "dependency-licences.md"
PERMISSIVE = frozenset(
    ["0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND", "ISC"]
) | frozenset(["MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"])
WEAK_COPYLEFT = frozenset(["MPL-2.0"])
"""Allowed as it came, unmodified, in a package of its own: their copyleft ends at their files."""
EXTRAS_ONLY = frozenset(["LGPL-2.1-or-later", "LGPL-3.0-or-later", "LGPL-3.0-only"])
"""Allowed where the user asks for it by name."""
# What metadata says in words. Keys are lower case; only what was looked at in the package itself.
SPELLED = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache software license 2.0": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "apache2.0": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd-3-clause license": "BSD-3-Clause",
    "mit license": "MIT",
    "the mit license (mit)": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "psf": "PSF-2.0",
    "new bsd license": "BSD-3-Clause",
    "modified bsd license": "BSD-3-Clause",
}
# Read in the licence file: the metadata of pyrage and sigstore-models is silent, and triton is not
# installed by the session (several hundred MB, of use on a GPU only).
LOOKED_UP = {"pyrage": "MIT", "sigstore-models": "MIT", "triton": "MIT"}


def installed(name: str) -> Distribution | None:
    """Return the installed distribution of a name, or None."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def stated(found: Distribution) -> str:
    """Return the licence that a distribution states, as an SPDX expression where it can be told."""
    if known := LOOKED_UP.get(canonicalize_name(found.name)):
        return known
    if expression := found.metadata.get("License-Expression"):
        return str(expression)
    words = str(found.metadata.get("License") or "").strip()
    classifiers = [
        line.rsplit(" :: ", 1)[-1]
        for line in found.metadata.get_all("Classifier") or ()
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    for candidate in [words, *classifiers]:
        if expression := SPELLED.get(candidate.lower()) or _spdx(candidate):
            return expression
    return words.splitlines()[0][:60] if words else " ".join(classifiers) or "unknown"


def _spdx(text: str) -> str | None:
    """Return a text that is an expression of known SPDX ids, or None."""
    if not text or len(text) > 200:
        return None
    try:
        parsed = get_spdx_licensing().parse(text, validate=True)
    except ExpressionError:
        return None
    return str(parsed)


def fits(expression: str, *, allowed: frozenset[str]) -> bool:
    """Whether one may take what this expression offers under licences of ``allowed`` alone."""
    licensing = get_spdx_licensing()
    try:
        parsed = licensing.parse(expression, validate=True)
    except ExpressionError:
        return False
    if parsed is None:  # of nothing
        return False
    # An exception ("Apache-2.0 WITH LLVM-exception") only adds to what the licence allows.
    values = {
        symbol: licensing.TRUE
        if getattr(symbol, "license_symbol", symbol).key in allowed
        else licensing.FALSE
        for symbol in parsed.symbols
    }
    return bool(parsed.subs(values, simplify=True) == licensing.TRUE)


def wanted(found: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    """Iterate over what a distribution with these extras requires on this machine."""
    for line in found.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        ):
            yield requirement


def closure(lines: Iterable[str]) -> set[str]:
    """Return the names of requirements and of all that these require, as far as installed."""
    seen: dict[str, set[str]] = {}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        asked = waiting.pop()
        name = canonicalize_name(asked.name)
        found = installed(name)
        if found is None or (name in seen and asked.extras <= seen[name]):
            continue
        seen[name] = seen.get(name, set()) | asked.extras
        waiting += wanted(found, seen[name])
    return set(seen)


def declared() -> tuple[set[str], set[str]]:
    """Return what our packages always ask for, and what only extras ask for."""
    ours = {canonicalize_name(project(package)["name"]) for package in PACKAGES}
    asked = [each for package in PACKAGES for each in requirements(project(package))]
    always = {canonicalize_name(each.name) for each, extra in asked if not extra} - ours
    return always, {canonicalize_name(each.name) for each, extra in asked if extra} - always - ours


def brought_by_extras(known: set[str]) -> set[str]:
    """Return what the locked extras install besides the packages that they name."""
    return closure(locked_extras()) - known


def table(names: set[str]) -> list[str]:
    """Return the rows of a table of distributions, without versions: those are in the lock."""
    rows = ["| package | licence |", "|---|---|"]
    for name in sorted(names):
        found = installed(name)
        licence = stated(found) if found else LOOKED_UP.get(name, "not installed here")
        rows.append(f"| {name} | {licence} |")
    return rows


def page() -> str:
    """Return the page of the documentation."""
    always, extras = declared()
    below = closure(sorted(always)) - always
    signing = brought_by_extras(always | below | extras)
    lines = [
        "# Licences of the dependencies",
        "",
        "Generated by `nox -s audit` from the metadata of the installed packages, as SPDX",
        "expressions. Our own five packages are Apache-2.0. The",
        "[policy](../explain/dependencies.md) says what may be in these tables, and the session",
        "fails on what may not. A CUDA build of torch brings NVIDIA's libraries besides, under",
        "NVIDIA's own terms; the list is made with the CPU build.",
        *("", "## Declared by a package", "", *table(always)),
        *("", "## Installed because of them", "", *table(below)),
        *("", "## Only with an extra", "", *table(extras)),
        *("", "## Installed because of the extra signing", "", *table(signing)),
    ]
    return "\n".join(lines) + "\n"


def misfits() -> Iterator[str]:
    """Iterate over sentences on what does not fit the policy."""
    always, extras = declared()
    needed = closure(sorted(always))
    ordinary = PERMISSIVE | WEAK_COPYLEFT
    for name in sorted(needed | extras | always | brought_by_extras(needed)):
        found = installed(name)
        allowed = ordinary | EXTRAS_ONLY if name in extras - needed else ordinary
        if found is None and name in LOOKED_UP:
            continue
        if found is None:
            yield f"{name} is declared and not installed, so its licence is unknown"
        elif not fits(stated(found), allowed=allowed):
            yield f"{name} {found.version}: {stated(found)!r} is not a licence that we accept"


def main(arguments: list[str]) -> int:
    """Check the licences, and write the page or compare it."""
    wrong = list(misfits())
    text = page()
    if "--check" not in arguments:
        PAGE.write_text(text)
    elif not PAGE.is_file() or PAGE.read_text() != text:
        wrong.append(f"{PAGE.relative_to(ROOT)} is not up to date: run {Path(__file__).name}")
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    rows = len(re.findall(r"^\| [a-z0-9]", text, flags=re.MULTILINE)) - text.count("| package |")
    sys.stdout.write(f"{rows} packages, {len(wrong)} problems\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
