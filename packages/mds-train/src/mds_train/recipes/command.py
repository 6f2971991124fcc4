"""The command ``mds-train recipes``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.errors import ExitCode, InputError

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.config.loading import Settings

__all__ = ["EXAMPLES", "add_arguments", "run_recipes"]

EXAMPLES = """\
examples:
  mds-train recipes list
  mds-train recipes show gpt3-175b
  mds-train recipes export llama3-8b --output llama3-8b.toml
  mds-train recipes export gpt3-1.3b --tiny --output tiny.toml
  mds-train recipes export gpt3-13b --shell > flags.sh
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add list, show and export."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="all recipes, their size and machine", allow_abbrev=False)
    show = actions.add_parser("show", help="the file as it stands", allow_abbrev=False)
    export = actions.add_parser(
        "export", help="one whole file, those it is based on taken in", allow_abbrev=False
    )
    for action in (show, export):
        action.add_argument("name", metavar="NAME")
    export.add_argument("--output", type=Path, metavar="F", help="instead of standard output")
    export.add_argument("--tiny", action="store_true", help="small enough for a laptop, two steps")
    export.add_argument("--shell", action="store_true", help="as flags of the original")


def run_recipes(options: argparse.Namespace, console: Console) -> int:
    """List, show or export.

    Raises:
        InputError: If there is no such recipe, or the output exists.
    """
    from mds_train.recipes.catalogue import find_recipe

    if options.action == "list":
        return _list(console)
    recipe = find_recipe(options.name)
    if options.action == "show":
        sys.stdout.write(recipe.path.read_text("utf-8"))
        return ExitCode.DONE
    from mds_train.config.loading import given_settings
    from mds_train.recipes.shell import as_flags
    from mds_train.recipes.tiny import tiny

    settings = tiny(recipe.settings()) if options.tiny else recipe.settings()
    text = (
        as_flags(settings, title=recipe.title)
        if options.shell
        else f"# {recipe.title}\n# GPUs: {recipe.gpus} of {recipe.gpu_gigabytes} GB\n\n"
        f"{given_settings(_by_file(settings))}"
    )
    if options.output is None:
        sys.stdout.write(text)
        return ExitCode.DONE
    if options.output.exists():
        raise InputError(f"{options.output} exists; choose another name.")
    options.output.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.output}\n")
    return ExitCode.DONE


def _by_file(settings: Settings) -> Settings:
    """With the names of the recipes' files, not where they are installed."""
    return {
        key: replace(setting, origin=Path(setting.origin).name) for key, setting in settings.items()
    }


def _list(console: Console) -> int:
    from rich.table import Table

    from mds_train.recipes.catalogue import all_recipes
    from mds_train.recipes.sizes import parameters_of
    from mds_train.watch.throughput import short_number

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("recipe", "left"), ("parameters", "right"), ("GPUs", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("")
    for recipe in all_recipes():
        size = short_number(parameters_of(recipe))
        table.add_row(recipe.name, size, f"{recipe.gpus:,}", recipe.title)
    console.print(table)
    return ExitCode.DONE
