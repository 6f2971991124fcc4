"""From the options of redaction to its rules: kinds, the key in a file, values that may stay."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path
from typing import cast

from mds_data.commands.errors import UsageError
from mds_data.errors import DataError
from mds_data.privacy import KINDS, Kind
from mds_data.privacy.rules import RedactionRules

__all__ = ["chosen_kinds", "optional_rules", "read_allowed", "read_key"]


def optional_rules(arguments: argparse.Namespace) -> RedactionRules | None:
    """What ``--redact`` and the options behind it ask for; None without it.

    Raises:
        UsageError: There are options but no ``--redact``.
        DataError: The key is missing, too short, or others can read it.
    """
    given = [arguments.redact_key_file, arguments.redact_kinds, arguments.redact_allow]
    given.append(arguments.redact_names)
    if arguments.redact is None:
        if any(each is not None for each in given) or arguments.redact_keep_kinds:
            raise UsageError("options that begin with --redact- need --redact too.")
        return None
    rules = RedactionRules(
        mode=arguments.redact,
        kinds=chosen_kinds(arguments.redact_kinds, arguments.redact_keep_kinds),
        key=read_key(arguments.redact_key_file),
        allow=read_allowed(arguments.redact_allow),
        names=arguments.redact_names,
    )
    rules.redactor()  # refuses a weak key before anything is read
    return rules


def chosen_kinds(kinds: list[str] | None, left_out: list[str]) -> tuple[Kind, ...]:
    """The kinds to replace."""
    return tuple(cast("Kind", kind) for kind in kinds or KINDS if kind not in left_out)


def read_allowed(path: Path | None) -> tuple[str, ...]:
    """The values in a file, one a line."""
    if path is None:
        return ()
    return tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())


def read_key(path: Path | None) -> bytes | None:
    """The key in a file that only its owner may read.

    Raises:
        DataError: Others may read it.
    """
    if path is None:
        return None
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise DataError(f"{path} can be read by others than its owner; run: chmod 600 {path}")
    return path.read_bytes().strip()
