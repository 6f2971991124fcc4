"""How the commands are spelled that write stores of pairs and of conversations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.destination_options import add_staging, place
from mds_data.commands.parser import add_tokenizer_options, command
from mds_data.commands.provenance_options import add_source_options
from mds_data.commands.redaction_options import add_redaction_options

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_paired_commands"]


def add_paired_commands(commands: Commands) -> None:
    """Add preprocess-nmt and preprocess-sft."""
    _add_preprocess_nmt(commands)
    _add_preprocess_sft(commands)


def _add_preprocess_nmt(commands: Commands) -> None:
    parser = command(
        commands,
        "preprocess-nmt",
        run="mds_data.commands.paired:preprocess_nmt",
        help="turn parallel text into a store of pairs",
        description="Tokenise pairs of sentences into a store. Two files must have as many lines\n"
        "(a line ends at LF and nowhere else); otherwise nothing is written. A pair is kept or\n"
        "dropped as a whole, and what was dropped is reported.",
        examples="examples:\n"
        "  mds-data preprocess-nmt --source train.en --target train.de \\\n"
        "                          --tokenizer tokenizer.json --max-length 256 --max-ratio 3 \\\n"
        "                          --split 98,2,0 --output store\n"
        "  mds-data preprocess-nmt --input pairs.tsv --tokenizer tokenizer.json --output store\n"
        "  mds-data preprocess-nmt --input wmt.jsonl.gz --source-key translation.en \\\n"
        "                          --target-key translation.de --tokenizer t.model --output store",
    )
    group = parser.add_argument_group("input: two files, or files of pairs")
    group.add_argument("--source", type=Path, metavar="F", help="one sentence a line")
    group.add_argument("--target", type=Path, metavar="F", help="its translation, line by line")
    group.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="F",
        help="TSV (source, tab, target) or JSON lines: files or quoted globs",
    )
    group.add_argument(
        "--input-format",
        choices=["auto", "tsv", "jsonl"],
        default="auto",
        help="auto: by the file's suffix (%(default)s)",
    )
    group.add_argument(
        "--source-key",
        default="source",
        metavar="KEY",
        help="JSON member of the source, also a path such as translation.en (%(default)s)",
    )
    group.add_argument(
        "--target-key", default="target", metavar="KEY", help="of the target (%(default)s)"
    )
    filters = parser.add_argument_group("filters, in tokens of one side")
    filters.add_argument(
        "--min-length", type=int, default=1, metavar="N", help="drop shorter pairs (%(default)s)"
    )
    filters.add_argument("--max-length", type=int, metavar="N", help="drop longer pairs")
    filters.add_argument(
        "--max-ratio",
        type=float,
        metavar="R",
        help="drop pairs of which one side is more than R times longer",
    )
    _add_writing(parser, what="pairs")
    add_tokenizer_options(parser)
    add_redaction_options(parser)
    old = parser.add_argument_group("accepted for old scripts", "It changes nothing here.")
    old.add_argument("--dataset-impl", choices=["lazy", "cached", "mmap"])


def _add_preprocess_sft(commands: Commands) -> None:
    parser = command(
        commands,
        "preprocess-sft",
        run="mds_data.commands.paired:preprocess_sft",
        help="turn conversations into a store for fine-tuning on answers",
        description="Render conversations by a chat template and tokenise them into a store that\n"
        "tells prompts from answers. The template is interpreted, never run; a mark's spelling\n"
        "inside a message is text. A line is a JSON object with messages (role, content),\n"
        "conversations (from, value), prompt and completion, or instruction, input and output.",
        examples="examples:\n"
        "  mds-data preprocess-sft --input chat.jsonl --chat-template chatml \\\n"
        "                          --tokenizer tokenizer.json --split 98,2,0 --output store\n"
        "  mds-data preprocess-sft --input chat.jsonl --tokenizer model/tokenizer.json \\\n"
        "                          --chat-template model/tokenizer_config.json --output store",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="F",
        help="JSON lines (.gz .bz2 .xz .zst too): files or quoted globs",
    )
    parser.add_argument(
        "--chat-template",
        required=True,
        metavar="T",
        help="chatml, llama-3, zephyr, alpaca or plain; or a .jinja file, a tokenizer_config.json, "
        "the folder of one",
    )
    parser.add_argument(
        "--max-length", type=int, metavar="N", help="drop conversations of more tokens"
    )
    _add_writing(parser, what="conversations")
    add_tokenizer_options(parser)
    add_redaction_options(parser)


def _add_writing(parser: argparse.ArgumentParser, *, what: str) -> None:
    output = parser.add_argument_group("output").add_mutually_exclusive_group(required=True)
    output.add_argument(
        "--output",
        type=place,
        metavar="STORE",
        help="the new store: a folder, or a URL such as s3://bucket/store",
    )
    output.add_argument(
        "--output-prefix", type=place, metavar="P", help="Megatron's spelling of --output"
    )
    add_staging(parser)
    parser.add_argument(
        "--split",
        metavar="A,B,C",
        help=f"shares of train, valid and test, by {what}, such as 98,2,0",
    )
    parser.add_argument(
        "--layout",
        choices=["hot", "archive"],
        default="hot",
        help="hot: for training; archive: compressed (%(default)s)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes; all cores when left out"
    )
    parser.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a broken line stops the work, or is left out and counted (%(default)s)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="F", help="write everything dropped as JSON lines to F"
    )
    parser.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help=f"in a log: a line every N {what}, instead of every 10 s",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the store if it exists")
    add_source_options(parser)
