"""The command line: run, resume, generate, report, doctor, config. Imports wait until needed."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.errors import ExitCode, InputError, UsageError, describe
from mds_train.launch import available_cores, extensions_folder, read_environment
from mds_train.log import logging_to

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.config.loading import Settings
    from mds_train.launch import Environment

__all__ = ["build_parser", "main"]

_Command = Callable[[argparse.Namespace, list[str], "Environment", "Console"], int]

_EPILOG = """\
examples:
  mds-train run examples/quickstart.toml --data.store store --train.run-dir runs/first
  torchrun --nproc-per-node 2 -m mds_train resume runs/first --parallel.tp-size 2
  mds-train generate runs/first --prompt "The function returns"

exit codes: 0 done, 1 a check found a problem, 2 wrong usage, 3 input rejected, 4 environment
"""
_OVERRIDES = (
    "Settings come from the file, then MDS_TABLE__KEY variables, then the command line: "
    "--parallel.tp-size 2, or Megatron's old names."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, _ = _parsers()
    try:
        options, rest = parser.parse_known_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    command: _Command = options.command
    rank = 0
    try:
        environment = read_environment()
        rank = environment.rank
        # Where standard output is the result (a text, a configuration), messages go beside it.
        beside = getattr(options, "print_config", True)
        console = _console(rank, stderr=beside)
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


def build_parser() -> argparse.ArgumentParser:
    """Return the whole parser, with the option of every setting."""
    from mds_train.config.overrides import add_to_parser

    parser, commands = _parsers()
    for name in ("run", "resume"):
        add_to_parser(commands[name])
    return parser


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser and those of the commands, without the options of the settings."""
    parser = argparse.ArgumentParser(
        prog="mds-train",
        description="Train large transformers on any layout, resume exactly, and use the result.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = importlib.metadata.version("mds-train")
    parser.add_argument("--version", action="version", version=f"mds-train {version}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    makers = {
        "run": _run_parser,
        "resume": _resume_parser,
        "finetune": _finetune_parser,
        "generate": _generate_parser,
        "evaluate": _evaluate_parser,
        "serve": _serve_parser,
        "plan": _plan_parser,
        "recipes": _recipes_parser,
        "launch": _launch_parser,
        "report": _report_parser,
        "doctor": _doctor_parser,
        "config": _config_parser,
    }
    commands = {name: make(subparsers) for name, make in makers.items()}
    for command in commands.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser, commands


_Commands = argparse._SubParsersAction


def _run_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "Train a model as a TOML file says."
    parser = commands.add_parser(
        "run",
        help=text,
        description=f"{text} {_OVERRIDES}",
        usage="%(prog)s CONFIG.toml [--dry-run] [--print-config] [overrides]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build configuration, data and a model without memory, print sizes and stop",
    )
    _add_settings_options(parser)
    parser.set_defaults(command=_run)
    return parser


def _resume_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "Go on with a run from its newest whole checkpoint, on any layout."
    parser = commands.add_parser(
        "resume",
        help=text,
        description=f"{text} {_OVERRIDES}",
        usage="%(prog)s RUN_DIR [--print-config] [overrides]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR")
    _add_settings_options(parser)
    parser.set_defaults(command=_resume)
    return parser


def _add_settings_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="store_true", help="show this and every setting")
    parser.add_argument(
        "--print-config", action="store_true", help="print each setting with its origin and stop"
    )


def _generate_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.generate.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "generate",
        "Continue texts with a checkpoint's model: drawn, greedy or by beam search.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_generate,
    )


def _evaluate_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.evaluate.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "evaluate",
        "Measure a model: perplexity, LAMBADA, lm-evaluation-harness, BLEU, GLUE, RACE.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_evaluate,
    )


def _serve_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.serve.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "serve",
        "Answer requests over HTTP: OpenAI's interface, Megatron's PUT /api, a page to try.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_serve,
    )


def _plan_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.plan.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "plan",
        "Say what a run will need: memory by part, time, traffic, disk; or search a layout.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_plan,
        usage="%(prog)s CONFIG [--gpus N] [--gpu KIND] [--search] [overrides] | --published",
    )


def _finetune_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.finetune.command import EXAMPLES, USAGE, add_arguments

    return _taught_parser(
        commands,
        "finetune",
        "Train the weights of a checkpoint further, on conversations or texts.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_finetune,
        usage=USAGE,
    )


def _recipes_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.recipes.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "recipes",
        "Ready configurations: GPT-3 125M to 175B and 1T, Llama 2 and 3, experts, BERT, T5.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_recipes,
    )


def _launch_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.jobs.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "launch",
        "Write the job file for a machine or cluster; nothing is submitted.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_launch,
        usage="%(prog)s CONFIG.toml --launcher L --run-dir DIR [options] [overrides]",
    )


def _report_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.report.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "report",
        "Write a page with the curves, speed and events of runs, side by side.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=_make_report,
    )


def _taught_parser(
    commands: _Commands[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    examples: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    command: _Command,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """A command whose options and examples stand in the folder of its work."""
    parser = commands.add_parser(
        name,
        help=text,
        description=text,
        epilog=examples,
        usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    parser.set_defaults(command=command)
    return parser


def _doctor_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    text = "Look at versions, devices, kernels, stale locks, shared memory and disk."
    parser = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(command=_doctor)
    return parser


def _config_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.migration.command import add_import_parser

    return add_import_parser(commands, command=_import_config)


def _import_config(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del environment
    from mds_train.migration.command import run_import

    return run_import(options, rest, console)


def _run(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    from mds_train import session

    prog = "mds-train run CONFIG.toml"
    if options.help:
        return _show_help("run", options.config, prog=prog)
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


def _resume(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    from mds_train import session

    prog = "mds-train resume RUN_DIR"
    if options.help:
        return _show_help("resume", None, prog=prog)
    run_dir = _required(options.run_dir, "RUN_DIR", command="resume")
    settings = session.settings_of_resumed_run(run_dir, rest, environment=environment, prog=prog)
    if options.print_config:
        return _print_config(settings)
    session.perform(settings, environment=environment, console=console, resume=True)
    return ExitCode.DONE


def _print_config(settings: Settings) -> int:
    from mds_train.config.loading import document_with_origins

    sys.stdout.write(document_with_origins(settings))
    return ExitCode.DONE


def _show_help(command: str, config: Path | None, *, prog: str) -> int:
    from mds_train.config.loading import read_toml
    from mds_train.config.overrides import print_help

    _, commands = _parsers()
    sys.stdout.write(commands[command].format_help() + "\n")
    sys.stdout.flush()
    print_help(prog=prog, settings=read_toml(config) if config is not None else {})
    return ExitCode.DONE


def _required(path: Path | None, name: str, *, command: str) -> Path:
    if path is None:
        raise UsageError(f"{name} is missing: mds-train {command} {name}. See --help.")
    return path


def _generate(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del console
    _no_more(rest)
    from mds_train.generate.command import run

    return run(options, environment)


def _evaluate(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del console
    _no_more(rest)
    from mds_train.evaluate.command import run

    return run(options, environment)


def _serve(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    _no_more(rest)
    from mds_train.serve.command import run

    return run(options, environment, console)


def _finetune(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    from mds_train import session
    from mds_train.finetune.settings import settings_of_base, with_data

    given = settings_of_base(options.model, options.data, options.output)
    prog = "mds-train finetune MODEL"
    merged = session.merged_settings(given, rest, environment=environment, prog=prog)
    settings = with_data(merged, epochs=options.epochs)
    if options.print_config:
        return _print_config(settings)
    config = session.checked_config(settings, world_size=environment.world_size)
    if options.merge and not config.lora.rank:
        raise UsageError("--merge adds adapters to the model; set --lora.rank to train some.")
    session.check_new_run(config)
    session.perform(settings, environment=environment, console=console, resume=False)
    if options.merge and environment.rank == 0:
        from mds_train.finetune.adapter import merge_adapter

        console.print(f"The merged model: {merge_adapter(options.output)}", markup=False)
    return ExitCode.DONE


def _plan(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del console
    from mds_train import session
    from mds_train.config.loading import build
    from mds_train.plan.command import show_plan, show_published
    from mds_train.recipes.catalogue import find_recipe

    if options.published:
        return show_published(_console(0))
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
    return show_plan(build(settings), options, _console(0), gpus=gpus)


def _recipes(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del environment, console
    _no_more(rest)
    from mds_train.recipes.command import run_recipes

    return run_recipes(options, _console(0))


def _launch(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del environment, console
    from mds_train.jobs.command import write_job

    return write_job(options, rest)


def _make_report(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del environment, console
    _no_more(rest)
    from mds_train.report.command import make_report

    return make_report(options)


def _doctor(
    options: argparse.Namespace, rest: list[str], environment: Environment, console: Console
) -> int:
    del environment, console
    _no_more(rest)
    import dataclasses

    from mds_train.doctor import examine

    findings = examine(extensions=extensions_folder(), cores=available_cores(), folder=Path.cwd())
    report, width = _console(0), max(len(finding.subject) for finding in findings)
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


def _no_more(rest: list[str]) -> None:
    if rest:
        raise UsageError(f"Unknown argument {rest[0]!r}; see --help.")


def _console(rank: int, *, stderr: bool = False) -> Console:
    from rich.console import Console

    class PatientConsole(Console):
        """A run goes on when whoever read its output has gone; its logs have it all."""

        def on_broken_pipe(self) -> None:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    return PatientConsole(stderr=stderr, highlight=False, quiet=rank != 0)


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
