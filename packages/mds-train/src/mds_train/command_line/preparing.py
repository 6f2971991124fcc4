"""The commands that prepare a run: recipes, launch, config import, doctor."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.command_line.arguments import no_more
from mds_train.command_line.console import console_of
from mds_train.errors import ExitCode
from mds_train.launch import available_cores, extensions_folder

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.launch import Environment

__all__ = ["doctor", "import_config", "launch", "recipes"]


def recipes(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """List or write ready configurations."""
    del environment, console
    no_more(rest)
    from mds_train.recipes.command import run_recipes

    return run_recipes(options, console_of(0))


def launch(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Write a job file."""
    del environment, console
    from mds_train.jobs.command import write_job

    return write_job(options, rest)


def import_config(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Turn a launch script into a configuration."""
    del environment
    from mds_train.migration.command import run_import

    return run_import(options, rest, console)


def doctor(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Look at the machine."""
    del environment, console
    no_more(rest)
    import dataclasses

    from mds_train.doctor import examine

    findings = examine(extensions=extensions_folder(), cores=available_cores(), folder=Path.cwd())
    report, width = console_of(0), max(len(finding.subject) for finding in findings)
    for finding in findings:
        if options.json:
            sys.stdout.write(json.dumps(dataclasses.asdict(finding)) + "\n")
            continue
        mark = "[red]![/]" if finding.is_problem else "[green]✓[/]"
        report.print(f"{mark} [bold]{finding.subject:<{width}}[/] ", end="")
        report.print(finding.text, markup=False, soft_wrap=True)
        if finding.is_problem:
            report.print(f"{'':<{width + 3}}→ {finding.remedy}", markup=False, soft_wrap=True)
    problems = any(finding.is_problem for finding in findings)
    return ExitCode.DIFFERENCE if problems else ExitCode.DONE
