"""How the commands that protect private data are spelled."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.parser import add_engine_options, add_task_option, command
from mds_data.commands.provenance_options import add_source_options
from mds_data.commands.redaction_options import MODES, add_rules

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_privacy_commands"]

_DESCRIPTION = """\
Replace private data in JSON lines or text: e-mail and internet addresses, telephone numbers,
payment cards, bank accounts, national identity numbers, passports, crypto addresses, keys and
passwords. What is replaced appears in no file that this command writes. Redacting again changes
nothing."""
_EXAMPLES = """\
examples:
  mds-data redact --input raw.jsonl --output clean.jsonl --report report.json --samples look.html
  mds-data redact --input 'raw/*.jsonl.gz' --output clean.jsonl.gz --mode mask --workers 8
  openssl rand -hex 32 > key && chmod 600 key
  mds-data redact --input raw.jsonl --output clean.jsonl --mode pseudonym --key-file key"""


def add_privacy_commands(commands: Commands) -> None:
    """Add redact."""
    parser = command(
        commands,
        "redact",
        run="mds_data.commands.redact:redact",
        help="replace private data in text",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
    )
    _add_files(parser)
    _add_choices(parser)
    add_engine_options(parser)
    add_source_options(parser)
    add_task_option(parser)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="F", help="files or globs: JSON lines or text")
    add("--input-format", choices=("auto", "jsonl", "text"), default="auto", help="(%(default)s)")
    add(
        "--text-unit",
        choices=("document", "paragraph", "line"),
        default="document",
        help="one document of a text file (%(default)s)",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="F",
        help="JSON lines; compressed if it ends with .gz, .bz2, .xz or .zst",
    )
    add("--overwrite", action="store_true", help="replace files that exist")
    add("--report", type=Path, metavar="F", help="write counts as JSON")
    add("--samples", type=Path, metavar="F", help="write a page that shows where it replaced")
    add(
        "--on-error",
        choices=("fail", "skip"),
        default="fail",
        help="a broken line ends the run, or is left out (%(default)s)",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--mode",
        choices=MODES,
        default="placeholder",
        help="<EMAIL>, asterisks, a stable keyed pseudonym, or nothing (%(default)s)",
    )
    add_rules(add, prefix="")
    add("--json-keys", nargs="+", default=["text"], metavar="K", help="members to redact (text)")
    add("--all-fields", action="store_true", help="redact every string of a record")
    add("--drop-keys", nargs="+", default=[], metavar="K", help="members to leave out")
