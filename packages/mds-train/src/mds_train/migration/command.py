"""`mds-train config import`: the command around the import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mds_train.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.migration.importing import Imported

__all__ = ["add_import_parser", "run_import"]

_DESCRIPTION = """\
Turn a Megatron(-DeepSpeed) launch script into a configuration. The script is read, never executed:
variables, arrays, conditions, here-documents and sed on a JSON template are followed.

SOURCE is a bash script, a JSON list of arguments, or the Python file with its arguments behind it:
  mds-train config import pretrain_gpt.sh --output run.toml
  mds-train config import pretrain_gpt.py --num-layers 24 --hidden-size 1024 ...
"""


def add_import_parser(commands: Any, *, command: Callable[..., int]) -> argparse.ArgumentParser:
    """Add the parser of ``config`` with its ``import``."""
    text = "Make a configuration from another program's."
    config = commands.add_parser("config", help=text, description=text, allow_abbrev=False)
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    parser: argparse.ArgumentParser = actions.add_parser(
        "import",
        help="from a Megatron(-DeepSpeed) launch script",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument(
        "--deepspeed-config",
        type=Path,
        metavar="FILE",
        help="DeepSpeed's JSON; default: the one that the script names or writes",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable that the script expects from outside; repeatable",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.toml", help="default: standard output")
    parser.set_defaults(command=command)
    config.set_defaults(debug=False)
    return parser


def run_import(options: argparse.Namespace, rest: Sequence[str], console: Console) -> int:
    """Import, write the configuration, and say what was not carried."""
    from mds_train.migration.importing import toml_text

    imported = _imported(options, rest)
    text = toml_text(imported)
    if options.output is None:
        sys.stdout.write(text)
    else:
        _write(options.output, text)
    _report(imported, console, output=options.output)
    return ExitCode.DONE


def _imported(options: argparse.Namespace, rest: Sequence[str]) -> Imported:
    from mds_train.migration.importing import import_arguments, import_script

    if options.source.suffix == ".py":
        words = [str(options.source), *rest]
        return import_arguments(words, name="the arguments", json_file=options.deepspeed_config)
    if rest:
        raise UsageError(f"Unknown argument {rest[0]!r}; see --help.")
    given = {}
    for item in options.set:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {item} is not of the form NAME=VALUE.")
        given[name] = value
    return import_script(options.source, deepspeed_config=options.deepspeed_config, given=given)


def _write(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _report(imported: Imported, console: Console, *, output: Path | None) -> None:
    for title, sentences, style in (
        ("Still to be written", imported.missing, "red"),
        ("Not carried", imported.left_out, "yellow"),
        ("To know", imported.remarks, ""),
        ("Nothing to do for", imported.idle, "dim"),
    ):
        if sentences:
            console.print(f"{title}:", style=style or None)
        for sentence in sentences:
            console.print(f"  {sentence}", markup=False, soft_wrap=True, style=style or None)
    if output is not None:
        console.print(f"Wrote {output} ({len(imported.settings)} settings).", soft_wrap=True)
        start = imported.start or "mds-train run"
        console.print(f"Start: {start} {output}", markup=False, soft_wrap=True)
