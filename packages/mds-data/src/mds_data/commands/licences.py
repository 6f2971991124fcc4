"""The command licences: every source of stores, its licence, and whether a policy takes it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mds_data.commands.key_options import key_of
from mds_data.commands.output import printable, write
from mds_data.provenance.family import Family, store_families
from mds_data.provenance.licence import LicencePolicy, read_policy
from mds_data.store.token_store import open_store

__all__ = ["licences"]


def licences(arguments: argparse.Namespace) -> int:
    """Print the sources of stores; 1 if the policy refuses one."""
    policy = read_policy(arguments.policy)
    found: dict[Path, list[Family]] = {}
    for path in arguments.stores:
        with open_store(path, key=key_of(arguments)) as store:
            found[path] = store_families(path, store.manifest)
    refused = sum(each.fault(policy) is not None for rows in found.values() for each in rows)
    if arguments.json:
        write([json.dumps(_as_json(found, policy), indent=1)])
    else:
        for path, rows in found.items():
            write(_lines(path, rows, policy))
        total = sum(map(len, found.values()))
        write([f"policy {policy.name}: {refused} of {total} sources refused"])
    return 1 if refused else 0


def _lines(path: Path, rows: list[Family], policy: LicencePolicy) -> Iterator[str]:
    yield printable(str(path))
    wide = max(len(each.licence or "unknown") for each in rows)
    for each in rows:
        fault = each.fault(policy)
        licence = printable(each.licence or "unknown").ljust(wide)
        terms = f"; {printable(each.terms)}" if each.terms else ""
        count = f"{each.files:,} file{'s' * (each.files != 1)}, {each.bytes / 1e6:,.1f} MB"
        line = f"  {'REFUSED' if fault else 'ok     '}  {licence}  {printable(each.source)}"
        yield f"{line}  ({count}{terms})" + (f": {fault}" if fault else "")


def _as_json(found: dict[Path, list[Family]], policy: LicencePolicy) -> dict[str, Any]:
    return {
        "policy": policy.name,
        "stores": [
            {
                "path": str(path),
                "sources": [
                    {**each.as_json(), "licence": each.licence, "refused": each.fault(policy)}
                    for each in rows
                ],
            }
            for path, rows in found.items()
        ],
    }
