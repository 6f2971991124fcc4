"""The commands that use what was trained: generate, evaluate, serve, report."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mds_train.command_line.arguments import no_more

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.launch import Environment

__all__ = ["evaluate", "generate", "report", "serve"]


def generate(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Continue texts."""
    del console
    no_more(rest)
    from mds_train.generate.command import run

    return run(options, environment)


def evaluate(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Measure a model."""
    del console
    no_more(rest)
    from mds_train.evaluate.command import run

    return run(options, environment)


def serve(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Answer requests."""
    no_more(rest)
    from mds_train.serve.command import run

    return run(options, environment, console)


def report(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Write a page about runs."""
    del environment, console
    no_more(rest)
    from mds_train.report.command import make_report

    return make_report(options)
