"""The commands that read settings: run, resume, finetune, plan."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.command_line.console import console_of
from mds_train.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.config.loading import Settings
    from mds_train.launch import Environment

__all__ = ["finetune", "plan", "resume", "run"]


def run(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Train as a file says."""
    from mds_train import session

    prog = "mds-train run CONFIG.toml"
    if options.help:
        return _show_help(options.parser, options.config, prog=prog)
    path = _required(options.config, "CONFIG.toml", command="run")
    settings = session.settings_of_new_run(path, rest, environment=environment, prog=prog)
    if options.print_config:
        return _print_config(settings)
    config = session.checked_config(settings, world_size=environment.world_size)
    session.check_store(config)
    if options.dry_run:
        from mds_train.dry_run import describe_run

        console.print(describe_run(config, world_size=environment.world_size))
        return ExitCode.DONE
    session.check_new_run(config)
    session.perform(settings, environment=environment, console=console, resume=False)
    return ExitCode.DONE


def resume(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Go on with a run."""
    from mds_train import session

    prog = "mds-train resume RUN_DIR"
    if options.help:
        return _show_help(options.parser, None, prog=prog)
    run_dir = _required(options.run_dir, "RUN_DIR", command="resume")
    settings = session.settings_of_resumed_run(run_dir, rest, environment=environment, prog=prog)
    if options.print_config:
        return _print_config(settings)
    session.perform(settings, environment=environment, console=console, resume=True)
    return ExitCode.DONE


def finetune(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Train a checkpoint's weights or adapters further."""
    from mds_train import session
    from mds_train.finetune.settings import key_in, settings_of_base, with_data

    prog = "mds-train finetune MODEL"
    named = session.named_settings(rest, environment=environment, prog=prog)
    given = settings_of_base(options.model, options.data, options.output, key=key_in(named))
    merged = session.merged_settings(given, rest, environment=environment, prog=prog)
    settings = with_data(merged, epochs=options.epochs)
    if options.print_config:
        return _print_config(settings)
    config = session.checked_config(settings, world_size=environment.world_size)
    if options.merge and not config.lora.rank:
        raise UsageError("--merge adds adapters to the model; set --lora.rank to train some.")
    if options.merge and config.checkpoint.encrypt_to:
        raise UsageError(
            "--merge writes a plain model, but checkpoint.encrypt_to asks for encrypted ones; "
            "leave one of them out."
        )
    session.check_new_run(config)
    session.perform(settings, environment=environment, console=console, resume=False)
    if options.merge and environment.rank == 0:
        from mds_train.finetune.adapter import merge_adapter

        whole = merge_adapter(options.output)
        console.print(f"The merged model: {whole}", markup=False, soft_wrap=True)
    return ExitCode.DONE


def plan(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    """Say what a run will need."""
    del console
    from mds_train import session
    from mds_train.config.loading import build
    from mds_train.plan.command import show_plan, show_published
    from mds_train.recipes.catalogue import find_recipe

    if options.published:
        return show_published(console_of(0))
    if options.config is None:
        raise UsageError(
            "mds-train plan needs a CONFIG: a file, or one of `mds-train recipes list`."
        )
    path, gpus = Path(options.config), options.gpus or 1
    if not path.exists() and path.suffix != ".toml":
        recipe = find_recipe(options.config)
        path, gpus = recipe.path, options.gpus or recipe.gpus
    named = any(word.startswith("--data.store") for word in rest)
    settings = session.settings_of_new_run(
        path,
        rest if named else ["--data.store", "store", *rest],
        environment=environment,
        prog="mds-train plan CONFIG",
    )
    return show_plan(build(settings), options, console_of(0), gpus=gpus)


def _print_config(settings: Settings) -> int:
    from mds_train.config.loading import document_with_origins

    sys.stdout.write(document_with_origins(settings))
    return ExitCode.DONE


def _show_help(parser: argparse.ArgumentParser, config: Path | None, *, prog: str) -> int:
    from mds_train.config.loading import read_toml
    from mds_train.config.overrides import print_help

    sys.stdout.write(parser.format_help() + "\n")
    sys.stdout.flush()
    print_help(prog=prog, settings=read_toml(config) if config is not None else {})
    return ExitCode.DONE


def _required(path: Path | None, name: str, *, command: str) -> Path:
    if path is None:
        raise UsageError(f"{name} is missing: mds-train {command} {name}. See --help.")
    return path
