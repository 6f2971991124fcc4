"""How the commands that read text are spelled: sample-corpus, train-tokenizer, preprocess."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mds_data.commands.destination_options import add_staging, place
from mds_data.commands.provenance_options import add_source_options
from mds_data.commands.redaction_options import add_redaction_options

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = [
    "add_engine_options",
    "add_input_options",
    "add_preprocess",
    "add_sample_corpus",
    "add_task_option",
    "add_tokenizer_options",
    "add_train_tokenizer",
    "command",
]


def command(
    commands: Commands,
    name: str,
    *,
    run: str,
    help: str,
    description: str,
    examples: str = "",
) -> argparse.ArgumentParser:
    """Add one command; ``run`` is ``module:function``, imported when the command is used."""
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_sample_corpus(commands: Commands) -> None:
    """Add sample-corpus."""
    parser = command(
        commands,
        "sample-corpus",
        run="mds_data.commands.text:sample_corpus",
        help="write 3 MB of English text that every Python carries",
        description="Write a small English corpus as JSON lines: Python's help topics and the\n"
        "documentation of its standard library. Nothing is downloaded, nothing is imported.",
        examples="example:\n  mds-data sample-corpus --output corpus.jsonl",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="F", help="file to write")
    parser.add_argument(
        "--seed", type=int, default=1234, help="order of the documents (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def add_train_tokenizer(commands: Commands) -> None:
    """Add train-tokenizer."""
    parser = command(
        commands,
        "train-tokenizer",
        run="mds_data.commands.text:train_tokenizer",
        help="train a tokenizer on text",
        description="Train a tokenizer of exactly --vocab-size tokens. The same input gives the\n"
        "same file, byte for byte.",
        examples="examples:\n"
        "  mds-data train-tokenizer --input corpus.jsonl --vocab-size 8192 \\\n"
        "                           --output tokenizer.json\n"
        "  mds-data train-tokenizer --input 'data/*.jsonl.gz' --model unigram \\\n"
        "                           --vocab-size 32000 --output tokenizer.model",
    )
    add_input_options(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="F",
        help="its file: .json, or .model for unigram",
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, metavar="N", help="tokens, special ones included"
    )
    parser.add_argument(
        "--model",
        choices=["bpe", "wordpiece", "unigram"],
        default="bpe",
        help="bpe as GPT-2, wordpiece as BERT, unigram by SentencePiece (%(default)s)",
    )
    parser.add_argument(
        "--special-tokens",
        nargs="+",
        default=["<|endoftext|>"],
        metavar="TOKEN",
        help="take the first ids; the first one ends a document (%(default)s)",
    )
    parser.add_argument(
        "--min-frequency",
        type=int,
        default=2,
        metavar="N",
        help="a pair must stand N times to become a token (%(default)s)",
    )
    parser.add_argument("--cased", action="store_true", help="wordpiece: keep case and accents")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")


def add_input_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what text is read, and how."""
    group = parser.add_argument_group("input")
    group.add_argument(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="F",
        help="JSON lines or text (.jsonl, .txt; .gz .bz2 .xz .zst), .parquet, .arrow, folders that "
        "HF datasets saved: files or quoted globs",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="members that hold text (%(default)s)",
    )
    group.add_argument(
        "--input-format",
        choices=["auto", "jsonl", "text", "parquet", "arrow"],
        default="auto",
        help="auto: by the file's suffix (%(default)s)",
    )
    group.add_argument(
        "--text-unit",
        choices=["document", "paragraph", "line"],
        default="document",
        help="what one document of a text file is: the file, a paragraph, a line (%(default)s)",
    )
    group.add_argument(
        "--on-error",
        choices=["fail", "skip"],
        default="fail",
        help="a broken line stops the work, or is left out and counted (%(default)s)",
    )


def add_preprocess(commands: Commands) -> None:
    """Add preprocess, with Megatron's flags."""
    parser = command(
        commands,
        "preprocess",
        run="mds_data.commands.preprocess:preprocess",
        help="turn text into a token store",
        description="Tokenise text into a store. The result does not depend on the number of\n"
        "workers; empty documents are left out and counted; a special token's spelling in a text\n"
        "is text.",
        examples="examples:\n"
        "  mds-data preprocess --input corpus.jsonl --tokenizer tokenizer.json --append-eod \\\n"
        "                      --split 95,5,0 --output store\n"
        "  mds-data preprocess --input 'web/*.jsonl.gz' books.txt --append-eod --workers 8 \\\n"
        "                      --tokenizer llama/tokenizer.model --on-error skip --output store\n"
        "as with Megatron's preprocess_data.py:\n"
        "  mds-data preprocess --input corpus.jsonl --tokenizer-type GPT2BPETokenizer \\\n"
        "                      --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt \\\n"
        "                      --append-eod --workers 8 --output-prefix my-gpt2",
    )
    add_input_options(parser)
    output = parser.add_argument_group("output").add_mutually_exclusive_group(required=True)
    output.add_argument(
        "--output",
        type=place,
        metavar="STORE",
        help="the store, a folder or a URL such as s3://bucket/store; with several keys it is "
        "STORE_KEY each",
    )
    output.add_argument(
        "--output-prefix",
        type=place,
        metavar="P",
        help="Megatron's spelling: the store is P_KEY_document",
    )
    add_staging(parser)
    _add_store_options(parser)
    add_engine_options(parser)
    add_task_option(parser)
    add_tokenizer_options(parser)
    add_redaction_options(parser)
    add_source_options(parser)
    _add_old_flags(parser)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the work is done."""
    group = parser.add_argument_group("where the work is done")
    group.add_argument(
        "--workers", type=int, metavar="N", help="processes; all cores when left out"
    )
    group.add_argument(
        "--engine",
        choices=["local", "ray"],
        default="local",
        help="this machine, or a Ray cluster that sees the same files (extra [ray]) (%(default)s)",
    )
    group.add_argument(
        "--address",
        metavar="A",
        help="of the Ray cluster, such as auto; one is started here when left out",
    )


def add_task_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that picks one part of the input, for job arrays."""
    parser.add_argument(
        "--task",
        metavar="I/N",
        help="work on part I of N of the input files only, as one task of a job array",
    )


def _add_store_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--split",
        metavar="A,B,C",
        help="shares of train, valid and test, by documents, such as 95,5,0",
    )
    parser.add_argument(
        "--columns",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="keep other members beside the tokens: NAME, NAME=MEMBER or NAME=MEMBER:KIND, where "
        "KIND is category, hash, int or float, and MEMBER may be @file",
    )
    parser.add_argument(
        "--layout",
        choices=["hot", "archive"],
        default="hot",
        help="hot: for training; archive: compressed (%(default)s)",
    )
    parser.add_argument(
        "--report", type=Path, metavar="F", help="write every problem as a JSON line to F"
    )
    parser.add_argument(
        "--log-interval",
        type=int,
        metavar="N",
        help="in a log: a line every N documents, instead of every 10 s",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the store if it exists")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on where an interrupted run of the same command was; begin if there is none",
    )
    parser.add_argument(
        "--checkpoint-mb",
        type=int,
        default=64,
        metavar="N",
        help="make the work so far durable every N MB of text, for --resume (%(default)s)",
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="keep the lengths of sentences, for BERT and T5; lists of sentences stay as they are",
    )
    parser.add_argument(
        "--lang",
        metavar="LANGUAGE",
        help="of --split-sentences: english knows abbreviations, others end at . ! ? (english)",
    )
    parser.add_argument(
        "--keep-newlines",
        action="store_true",
        help="of --split-sentences: leave the white space after a sentence in it",
    )


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a tokenizer, ours and Megatron's."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="F",
        help="tokenizer.json, tokenizer.model, or their folder",
    )
    group.add_argument(
        "--tokenizer-type",
        choices=[
            "HFTokenizer",
            "GPT2BPETokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "NullTokenizer",
        ],
        metavar="TYPE",
        help="Megatron's name, with the files below: %(choices)s",
    )
    group.add_argument(
        "--tokenizer-model",
        type=Path,
        metavar="F",
        help="of HFTokenizer and the SentencePiece ones",
    )
    group.add_argument(
        "--vocab-file", type=Path, metavar="F", help="of GPT2BPETokenizer and the Bert ones"
    )
    group.add_argument("--merge-file", type=Path, metavar="F", help="of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="of NullTokenizer")
    group.add_argument(
        "--vocab-extra-ids",
        type=int,
        default=0,
        metavar="N",
        help="T5's sentinels after the vocabulary",
    )
    group.add_argument(
        "--eod-token",
        metavar="TOKEN",
        help="the token that ends a document; found by its usual names when left out",
    )
    group.add_argument(
        "--allow-special-tokens",
        action="store_true",
        help="a special token's spelling in a text becomes that token",
    )


def _add_old_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "accepted for old scripts", "They change nothing here; each says why when it is used."
    )
    group.add_argument("--dataset-impl", choices=["lazy", "cached", "mmap"])
    group.add_argument("--chunk-size", type=int, metavar="N")
    group.add_argument("--partitions", type=int, metavar="N")
    group.add_argument("--seq-length", type=int, metavar="N")
    group.add_argument("--trust-remote-code", nargs="?", const="true")
