"""How the commands on whole stores are spelled."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.destination_options import add_staging, place
from mds_data.commands.key_options import add_key_options
from mds_data.commands.parser import command

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_store_commands"]

_PAIR = "a Megatron .bin/.idx pair, by its prefix"


def add_store_commands(commands: Commands) -> None:
    """Add inspect, verify, merge, split, import, export, repack, erase, repair and licences."""
    _add_inspect(commands)
    _add_verify(commands)
    _add_merge(commands)
    _add_split(commands)
    _add_import(commands)
    _add_export(commands)
    _add_repack(commands)
    _add_erase(commands)
    _add_repair(commands)
    _add_licences(commands)


def _add_inspect(commands: Commands) -> None:
    parser = command(
        commands,
        "inspect",
        run="mds_data.commands.inspect:inspect",
        help="show what a store holds",
        description="Show documents, tokens, lengths, tokenizer, split, frequent tokens and\n"
        f"samples of a store, or of {_PAIR}.",
        examples="examples:\n"
        "  mds-data inspect store\n"
        "  mds-data inspect store --json | jq .tokens\n"
        "  mds-data inspect store --html store.html",
    )
    parser.add_argument("path", type=place, metavar="STORE", help="or a URL such as s3://bucket/x")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument(
        "--html", type=Path, metavar="F", help="write everything as one page for a browser"
    )
    parser.add_argument(
        "--croissant",
        type=Path,
        metavar="F",
        help="write a description for catalogues: files, licences and sources as Croissant JSON-LD",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the page if it exists")
    parser.add_argument(
        "--top", type=int, default=20, metavar="N", help="frequent tokens (%(default)s)"
    )
    parser.add_argument(
        "--samples", type=int, default=2, metavar="N", help="documents to show (%(default)s)"
    )
    add_key_options(parser)


def _add_verify(commands: Commands) -> None:
    parser = command(
        commands,
        "verify",
        run="mds_data.commands.store:verify",
        help="check every byte of a store",
        description="Read the whole store and name flipped bits, missing, cut and foreign files,\n"
        "documents out of order and tokens outside the vocabulary. Exit code 1 if there are any.",
        examples="example:\n  mds-data verify store",
    )
    parser.add_argument("path", type=place, metavar="STORE", help="or a URL such as s3://bucket/x")
    add_key_options(parser)


def _add_merge(commands: Commands) -> None:
    parser = command(
        commands,
        "merge",
        run="mds_data.commands.store:merge",
        help="join stores without rewriting them",
        description="Join stores in the order given. Files are hard-linked where the file system\n"
        "can, so a merge costs neither time nor space. With --rewrite the tokens are copied: the\n"
        "stores of a job array become the very bytes that one preprocess would have written.\n"
        "What the tasks of analyze have measured is joined into one index.",
        examples="examples:\n"
        "  mds-data merge part-0 part-1 --output whole --split 969,30,1\n"
        "  mds-data merge store.task-* --rewrite --output store\n"
        "  mds-data merge difficulty.task-* --output difficulty",
    )
    parser.add_argument(
        "sources", nargs="+", type=place, metavar="STORE", help=f"or a URL, or {_PAIR}"
    )
    _add_output(parser)
    _add_split_option(parser)
    parser.add_argument(
        "--rewrite",
        action="store_true",
        help="copy the tokens into one store without segments, instead of linking files",
    )


def _add_split(commands: Commands) -> None:
    parser = command(
        commands,
        "split",
        run="mds_data.commands.store:split",
        help="write train, valid and test as stores of their own",
        description="Write the parts of a split as FOLDER/train, FOLDER/valid and FOLDER/test.",
        examples="example:\n  mds-data split store --split 95,5,0 --output parts",
    )
    parser.add_argument("store", type=place, metavar="STORE", help="or a URL")
    parser.add_argument("--output", type=place, required=True, metavar="FOLDER", help="or a URL")
    add_staging(parser)
    _add_split_option(parser)
    parser.add_argument(
        "--layout", choices=["hot", "archive"], help="the store's own when left out"
    )


def _add_import(commands: Commands) -> None:
    parser = command(
        commands,
        "import",
        run="mds_data.commands.store:import_",
        help="write a Megatron .bin/.idx pair as a store",
        description="Write the documents of a Megatron pair (the mapped format or the old TNTIDX)\n"
        "as a store. Stores and pairs can be opened alike; a store also has checksums.",
        examples="example:\n"
        "  mds-data import my-gpt2_text_document --eod-id 50256 --vocab-size 50257 --output store",
    )
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help=_PAIR)
    _add_output(parser)
    _add_vocabulary(parser)
    parser.add_argument(
        "--eod-id", type=int, metavar="N", help="the id that ends a document, if any"
    )


def _add_repair(commands: Commands) -> None:
    parser = command(
        commands,
        "repair",
        run="mds_data.commands.store:repair",
        help="mend a pair that the old --append-eod wrote wrong",
        description="The original's --append-eod wrote an end token after each document and\n"
        "forgot it in the index, so that each document is read shifted. Write the true documents\n"
        "as a store.",
        examples="example:\n  mds-data repair my-gpt2_text_document --output store",
    )
    parser.add_argument("prefix", type=Path, metavar="PREFIX", help=_PAIR)
    _add_output(parser)
    _add_vocabulary(parser)


def _add_export(commands: Commands) -> None:
    parser = command(
        commands,
        "export",
        run="mds_data.commands.store:export",
        help="write a store as a Megatron .bin/.idx pair",
        description="Write a store as a pair that Megatron and its descendants read.",
        examples="example:\n  mds-data export store --output-prefix my-gpt2_text_document",
    )
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument(
        "--output-prefix", type=place, required=True, metavar="PREFIX", help="or a URL"
    )
    add_staging(parser)
    add_key_options(parser)


def _add_repack(commands: Commands) -> None:
    parser = command(
        commands,
        "repack",
        run="mds_data.commands.store:repack",
        help="write a store anew in the other layout",
        description="hot: for training, read as fast as a memory map. archive: compressed to 0.4\n"
        "of the size. Gaps are left out and segments joined; documents keep their numbers.",
        examples="example:\n  mds-data repack store --layout archive --output store-archive",
    )
    parser.add_argument("store", type=place, metavar="STORE", help="or a URL")
    _add_output(parser)
    parser.add_argument("--layout", choices=["hot", "archive"], required=True)


def _add_erase(commands: Commands) -> None:
    parser = command(
        commands,
        "erase",
        run="mds_data.commands.store:erase",
        help="erase documents: overwrite their bytes, keep a record",
        description="Overwrite documents with zeros. Their numbers stay taken, and the manifest\n"
        "keeps a record of numbers and reason, never of content. Stores that share the files by\n"
        "hard link are named (exit code 1): they still hold the documents.",
        examples="example:\n  mds-data erase store --documents 17 120-125 --reason 'request 4711'",
    )
    parser.add_argument("store", type=place, metavar="STORE", help="or a URL")
    parser.add_argument(
        "--documents", nargs="+", required=True, metavar="N", help="numbers, or ranges such as 5-9"
    )
    parser.add_argument("--reason", required=True, metavar="TEXT", help="kept in the record")
    parser.add_argument(
        "--search",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="where to look for stores that share files; the store's parent when left out",
    )


def _add_licences(commands: Commands) -> None:
    parser = command(
        commands,
        "licences",
        run="mds_data.commands.licences:licences",
        help="list the sources of stores and check their licences",
        description="List every source of a store, with its licence as it was recorded (options\n"
        "--licence and --sources of preprocess, clean, ...). Exit code 1 if the policy refuses\n"
        "one. Policies: known (some licence is recorded), open (and it forbids neither commerce\n"
        "nor changes), permissive (and asks for attribution at most); or a TOML file with\n"
        'allow = ["CC-BY-*", ...], deny = [...] and unknown = "accept" or "fail".',
        examples="examples:\n"
        "  mds-data licences store\n"
        "  mds-data licences store-a store-b --policy permissive --json",
    )
    parser.add_argument("stores", nargs="+", type=Path, metavar="STORE")
    parser.add_argument("--policy", default="open", metavar="NAME|F.toml", help="(%(default)s)")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    add_key_options(parser, old=True)


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=place,
        required=True,
        metavar="STORE",
        help="the new store: a folder, or a URL such as s3://bucket/store",
    )
    add_staging(parser)


def _add_split_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--split",
        metavar="A,B,C",
        help="shares of train, valid and test by documents; the store's own when left out",
    )


def _add_vocabulary(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="true vocabulary; largest id plus one when left out",
    )
    parser.add_argument("--layout", choices=["hot", "archive"], default="hot", help="(%(default)s)")
