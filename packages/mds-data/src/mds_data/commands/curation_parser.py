"""How the commands that choose texts are spelled: clean, dedup, decontaminate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.parser import add_engine_options, add_input_options, add_task_option, command
from mds_data.commands.provenance_options import add_source_options

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_curation_commands"]


def add_curation_commands(commands: Commands) -> None:
    """Add clean, dedup and decontaminate."""
    _add_clean(commands)
    _add_dedup(commands)
    _add_decontaminate(commands)


def _add_clean(commands: Commands) -> None:
    parser = command(
        commands,
        "clean",
        run="mds_data.commands.curation:clean",
        help="mend texts, keep languages, drop what is too short or repeats",
        description="Mend texts and remove those that break the rules asked for. Records keep\n"
        "their other members, and their bytes where nothing was mended.",
        examples="example:\n"
        "  mds-data clean --input 'web/*.jsonl.gz' --fix-text --languages en --min-words 50 \\\n"
        "                 --repetition --report why.json --output clean.jsonl.gz",
    )
    _add_files(parser)
    add_task_option(parser)
    rules = parser.add_argument_group("rules", "At least one is needed.")
    rules.add_argument(
        "--fix-text",
        action="store_true",
        help="mend mojibake, HTML entities and control characters (extra [clean]: ftfy)",
    )
    rules.add_argument(
        "--languages",
        nargs="+",
        default=[],
        metavar="CODE",
        help="keep texts in these only, such as en de (extra [clean]: py3langid)",
    )
    rules.add_argument(
        "--min-probability",
        type=float,
        default=0.65,
        metavar="P",
        help="how sure the language must be (%(default)s)",
    )
    for bound in ("min", "max"):
        for unit in ("characters", "words"):
            rules.add_argument(f"--{bound}-{unit}", type=int, metavar="N")
    rules.add_argument(
        "--repetition",
        action="store_true",
        help="drop texts with too many repeated lines, paragraphs or word sequences, by the limits "
        "of Gopher",
    )


def _add_dedup(commands: Commands) -> None:
    parser = command(
        commands,
        "dedup",
        run="mds_data.commands.curation:dedup",
        help="remove texts that are copies, or nearly so",
        description="Write each text once: the first of all that are alike. Memory does not grow\n"
        "with the input; about 1 KB a text is needed on the output's disk meanwhile.",
        examples="examples:\n"
        "  mds-data dedup --input 'clean-*.jsonl' --report why.json --output unique.jsonl\n"
        "  mds-data dedup --input corpus.jsonl --mode exact --output unique.jsonl\n"
        "as a job array, whose tasks sign texts and whose last step compares them:\n"
        "  mds-data dedup --input 'clean-*.jsonl' --task 3/8 --output unique.jsonl\n"
        "  mds-data dedup --input 'clean-*.jsonl' --output unique.jsonl \\\n"
        "                 --signatures unique.task-*.signatures",
    )
    _add_files(parser)
    add_task_option(parser)
    parser.add_argument(
        "--signatures",
        nargs="+",
        type=Path,
        default=[],
        metavar="F",
        help="what the tasks of a job array have written, of every task",
    )
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--mode",
        choices=["near", "exact"],
        default="near",
        help="near: alike by MinHash; exact: the same text (%(default)s)",
    )
    rules.add_argument(
        "--threshold",
        type=float,
        default=0.8,
        metavar="S",
        help="of near: the share of word sequences in common (%(default)s)",
    )
    rules.add_argument(
        "--shingle-words",
        type=int,
        default=5,
        metavar="N",
        help="words of a sequence (%(default)s)",
    )
    rules.add_argument(
        "--permutations",
        type=int,
        default=128,
        metavar="N",
        help="more estimate better and take longer (%(default)s)",
    )


def _add_decontaminate(commands: Commands) -> None:
    parser = command(
        commands,
        "decontaminate",
        run="mds_data.commands.curation:decontaminate",
        help="remove texts that hold test questions",
        description="Remove texts that share a sequence of words with a reference, such as the\n"
        "questions of a benchmark. Case, signs and white space do not matter.",
        examples="example:\n"
        "  mds-data decontaminate --input corpus.jsonl --against 'benchmarks/*.jsonl' \\\n"
        "                         --against-keys question --report why.json --output fair.jsonl",
    )
    _add_files(parser)
    add_task_option(parser)
    rules = parser.add_argument_group("rules")
    rules.add_argument(
        "--against",
        nargs="+",
        required=True,
        metavar="F",
        help="the references: files or quoted globs, as for --input; each line of a text is one",
    )
    rules.add_argument("--against-keys", nargs="+", default=["text"], metavar="KEY")
    rules.add_argument(
        "--words", type=int, default=13, metavar="N", help="words of a sequence (%(default)s)"
    )
    rules.add_argument(
        "--min-words",
        type=int,
        default=8,
        metavar="N",
        help="shorter references are passed over (%(default)s)",
    )
    rules.add_argument(
        "--max-texts",
        type=int,
        metavar="N",
        help="ignore sequences that more than N texts hold, such as a licence (GPT-3: 10); "
        "reads the input twice",
    )
    _add_cutting(rules)


def _add_cutting(rules: argparse._ArgumentGroup) -> None:
    """What becomes of a text that shares a sequence."""
    rules.add_argument(
        "--action",
        choices=["drop", "cut"],
        default="drop",
        help="drop the text, or cut the place out and keep the pieces (%(default)s)",
    )
    rules.add_argument(
        "--margin",
        type=int,
        default=200,
        metavar="N",
        help="of cut: characters that go on either side (%(default)s)",
    )
    rules.add_argument(
        "--min-piece",
        type=int,
        default=200,
        metavar="N",
        help="of cut: shorter pieces are dropped (%(default)s)",
    )
    rules.add_argument(
        "--max-pieces",
        type=int,
        default=10,
        metavar="N",
        help="of cut: a text in more pieces is dropped (%(default)s)",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    add_input_options(parser)
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="F",
        help="JSON lines; compressed if it ends with .gz, .bz2, .xz or .zst",
    )
    group.add_argument("--report", type=Path, metavar="F", help="what was removed and why, as JSON")
    group.add_argument(
        "--removed", type=Path, metavar="F", help="the removed records with their reasons"
    )
    group.add_argument("--overwrite", action="store_true", help="replace files that exist")
    add_engine_options(parser)
    add_source_options(parser)
