"""The command line: one parser, one way to end. Imports wait until needed."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mds_train.command_line.console import console_of
from mds_train.command_line.parsers import parsers
from mds_train.errors import ExitCode, InputError, UsageError, describe
from mds_train.launch import Environment, read_environment
from mds_train.log import logging_to

if TYPE_CHECKING:
    from mds_train.command_line.parsers import Command

__all__ = ["build_parser", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, _ = parsers()
    try:
        options, rest = parser.parse_known_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    command: Command = options.command
    rank = 0
    try:
        environment = _environment(options)
        rank = environment.rank
        # Where standard output is the result (a text, a configuration), messages go beside it.
        beside = getattr(options, "print_config", True)
        console = console_of(rank, stderr=beside)
        with logging_to(None, rank=rank, console=console):
            return command(options, rest, environment, console)
    except SystemExit as stop:  # tyro has said what is wrong
        return int(stop.code or 0)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to say
        return ExitCode.DONE
    except (Exception, KeyboardInterrupt) as error:
        logging.getLogger(__name__).debug("The command failed.", exc_info=True)
        return _report(error, rank=rank, debug=options.debug)


def _environment(options: argparse.Namespace) -> Environment:
    """What a launcher has set; for a dry run, as many ranks as it is told of."""
    ranks = getattr(options, "ranks", None)
    if ranks is None:
        return read_environment()
    if not options.dry_run:
        raise UsageError(
            "--ranks says how many a --dry-run is for; torchrun, deepspeed or srun start them."
        )
    if ranks < 1:
        raise UsageError(f"--ranks is {ranks}, but it must be at least 1.")
    return replace(read_environment(), world_size=ranks)


def build_parser() -> argparse.ArgumentParser:
    """Return the whole parser, with the option of every setting."""
    from mds_train.config.overrides import add_to_parser

    parser, commands = parsers()
    for name in ("run", "resume"):
        add_to_parser(commands[name])
    return parser


def _report(error: BaseException, *, rank: int, debug: bool) -> int:
    """Write one sentence, or the traceback if it was asked for."""
    failure = describe(error)
    if rank and isinstance(error, (UsageError, InputError)):
        return failure.code  # every rank finds the same, and rank 0 says it
    if debug:
        sys.stderr.write("".join(traceback.format_exception(error)))
    else:
        where = f"rank {rank}: " if rank else ""
        sys.stderr.write(f"{where}error: {failure.sentence}\n")
    return failure.code
