"""Writes each package's bill of materials (CycloneDX), which its wheel carries in .dist-info/sboms.

    python tests/supply/sbom.py             write packages/NAME/DISTRIBUTION.cdx.json
    python tests/supply/sbom.py --check     exit with 1 if one is not what pyproject.toml says

Our wheels bundle nothing of others. So the bill names the package itself and what it asks an
installer for, with the accepted versions; which ones were installed only the installed
environment can say. No clock, random number or machine goes in: equal sources, equal bytes.
"""

from __future__ import annotations

import json
import sys
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGES = ("mds-kernels", "mds-core", "mds-data", "mds-ckpt", "mds-train")


def project(package: str) -> dict[str, Any]:
    """Return the [project] table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def bill_path(package: str) -> Path:
    """Return where the bill of a package lies."""
    return ROOT / "packages" / package / f"{project(package)['name']}.cdx.json"


def requirements(table: dict[str, Any]) -> Iterator[tuple[Requirement, str]]:
    """Iterate over what a package declares, each with the extra that asks for it ("" for none)."""
    yield from ((Requirement(line), "") for line in table["dependencies"])
    for extra, lines in table.get("optional-dependencies", {}).items():
        yield from ((Requirement(line), extra) for line in lines)


def component(name: str, asked: list[tuple[Requirement, str]]) -> dict[str, Any]:
    """Return the entry of one dependency, which some parts of the package may ask for."""
    first = asked[0][0]
    parts = sorted(first.specifier, key=lambda part: Version(part.version))
    ranges = "|".join(str(part) for part in parts) or "*"
    always = any(not extra for _, extra in asked)
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}",
        "name": name,
        "versionRange": f"vers:pypi/{ranges}",
        "purl": f"pkg:pypi/{name}",
        "scope": "required" if always else "optional",
        "isExternal": True,
        "properties": [
            {"name": "python:requirement", "value": f"{each}{f' (extra {extra})' * bool(extra)}"}
            for each, extra in asked
        ],
    }


def bill(package: str) -> dict[str, Any]:
    """Return a package's bill of materials."""
    table = project(package)
    ref = f"pkg:pypi/{table['name']}@{table['version']}"
    asked: dict[str, list[tuple[Requirement, str]]] = {}
    for requirement, extra in requirements(table):
        asked.setdefault(canonicalize_name(requirement.name), []).append((requirement, extra))
    components = [component(name, asked[name]) for name in sorted(asked)]
    body = {
        "metadata": {
            "lifecycles": [{"phase": "pre-build"}],
            "component": {
                "type": "library",
                "bom-ref": ref,
                "name": table["name"],
                "version": table["version"],
                "description": table["description"],
                "licenses": [{"license": {"id": table["license"]}}],
                "purl": ref,
            },
        },
        "components": components,
        "dependencies": [
            {"ref": ref, "dependsOn": [each["bom-ref"] for each in components]},
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.7", "serialNumber": f"urn:uuid:{serial}"}
    return {**head, "version": 1, **body}


def bill_text(package: str) -> str:
    """Return the text of a package's bill."""
    return json.dumps(bill(package), indent=1) + "\n"


def main(arguments: list[str]) -> int:
    """Write the bills, or check them."""
    stale = [
        bill_path(package)
        for package in PACKAGES
        if not bill_path(package).is_file() or bill_path(package).read_text() != bill_text(package)
    ]
    if "--check" in arguments:
        for path in stale:
            sys.stdout.write(f"{path.relative_to(ROOT)} is not what pyproject.toml says; ")
            sys.stdout.write("run python tests/supply/sbom.py\n")
        return 1 if stale else 0
    for package in PACKAGES:
        bill_path(package).write_text(bill_text(package))
    sys.stdout.write(f"{len(stale)} of {len(PACKAGES)} bills of materials changed\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
