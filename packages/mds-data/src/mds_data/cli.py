"""The command line of mds-data: what there is, and how each command is spelled.

Each command's work is imported when it runs, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from mds_data.commands.curation_parser import add_curation_commands
from mds_data.commands.destination_options import url_member
from mds_data.commands.difficulty_parser import add_analyze
from mds_data.commands.encryption_parser import add_encryption_commands
from mds_data.commands.errors import exit_code, sentence
from mds_data.commands.paired_parser import add_paired_commands
from mds_data.commands.parser import add_preprocess, add_sample_corpus, add_train_tokenizer
from mds_data.commands.privacy_parser import add_privacy_commands
from mds_data.commands.store_parser import add_store_commands

__all__ = ["build_parser", "main"]

_DESCRIPTION = """\
Build, check and read token datasets. A dataset is a store: a folder of Zarr arrays that a trainer
reads at the speed of a memory map, and a manifest that knows every file in it."""

_EXAMPLES = """\
from nothing to a dataset, without a download:
  mds-data sample-corpus --output corpus.jsonl
  mds-data train-tokenizer --input corpus.jsonl --vocab-size 8192 --output tokenizer.json
  mds-data preprocess --input corpus.jsonl --tokenizer tokenizer.json --append-eod \\
                      --split 95,5,0 --output store
  mds-data inspect store

exit codes: 0 done, 1 a check found a difference, 2 wrong usage, 3 input rejected, 4 disk full, no
permission or a worker lost. Add --debug to a command to see where an error came from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = build_parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    module, _, function = str(arguments.run).partition(":")
    try:
        code = _run(getattr(importlib.import_module(module), function), arguments)
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output (a pager, head) has gone; that is no error.
        return 0
    except (ValueError, OSError, MemoryError, ImportError, KeyboardInterrupt) as error:
        if arguments.debug:
            raise
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # A failed write() does not say where; only the output is written.
            error.filename = getattr(arguments, "output", None)
        sys.stderr.write(f"mds-data {arguments.command}: {sentence(error)}\n")
        return exit_code(error)
    return code


def _run(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    member = url_member(arguments)
    if member is None:
        return command(arguments)
    from mds_data.commands.destinations import run_staged

    return run_staged(command, arguments, member=member)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="mds-data",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_sample_corpus(commands)
    add_train_tokenizer(commands)
    add_preprocess(commands)
    add_paired_commands(commands)
    add_analyze(commands)
    add_curation_commands(commands)
    add_privacy_commands(commands)
    add_store_commands(commands)
    add_encryption_commands(commands)
    return parser


class _Version(argparse.Action):
    """Asks for the version only when it is wanted: that takes longer than all the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        sys.stdout.write(f"mds-data {version('mds-data')}\n")
        parser.exit()
