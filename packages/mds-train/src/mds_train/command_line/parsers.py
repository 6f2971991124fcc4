"""What each command takes. Options stand in the folder of the command's work."""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.command_line import preparing, training, using

if TYPE_CHECKING:
    from rich.console import Console

    from mds_train.launch import Environment

__all__ = ["Command", "parsers"]

Command = Callable[[argparse.Namespace, list[str], "Environment", "Console"], int]

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


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
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
        usage="%(prog)s CONFIG.toml [--dry-run [--ranks N]] [--print-config] [overrides]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build configuration, data and a model without memory, print sizes and stop",
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="the dry run is for so many; default: one"
    )
    _add_settings_options(parser)
    parser.set_defaults(command=training.run, parser=parser)
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
    parser.set_defaults(command=training.resume, parser=parser)
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
        command=using.generate,
    )


def _evaluate_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.evaluate.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "evaluate",
        "Measure a model: perplexity, LAMBADA, lm-evaluation-harness, BLEU, GLUE, RACE.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=using.evaluate,
    )


def _serve_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.serve.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "serve",
        "Answer requests over HTTP: OpenAI's interface, Megatron's PUT /api, a page to try.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=using.serve,
    )


def _plan_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.plan.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "plan",
        "Say what a run will need: memory by part, time, traffic, disk; or search a layout.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=training.plan,
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
        command=training.finetune,
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
        command=preparing.recipes,
    )


def _launch_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.jobs.command import EXAMPLES, add_arguments

    return _taught_parser(
        commands,
        "launch",
        "Write the job file for a machine or cluster; nothing is submitted.",
        examples=EXAMPLES,
        add_arguments=add_arguments,
        command=preparing.launch,
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
        command=using.report,
    )


def _taught_parser(
    commands: _Commands[argparse.ArgumentParser],
    name: str,
    text: str,
    *,
    examples: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    command: Command,
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
    parser.set_defaults(command=preparing.doctor)
    return parser


def _config_parser(commands: _Commands[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    from mds_train.migration.command import add_import_parser

    return add_import_parser(commands, command=preparing.import_config)
