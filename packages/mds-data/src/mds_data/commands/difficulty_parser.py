"""How the command analyze is spelled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mds_data.commands.parser import add_engine_options, command

if TYPE_CHECKING:
    from mds_data.commands.parser import Commands

__all__ = ["add_analyze"]


def add_analyze(commands: Commands) -> None:
    """Add analyze."""
    parser = command(
        commands,
        "analyze",
        run="mds_data.commands.difficulty:analyze",
        help="measure how hard samples are, for a curriculum",
        description="Measure the difficulty of every sample (or document) of a store and write an\n"
        "index, which a curriculum orders training by. The result does not depend on the number\n"
        "of workers.",
        examples="examples:\n"
        "  mds-data analyze store --seq-length 1024 --split train --output difficulty\n"
        "  mds-data analyze store --unit document --metric length mean-rarity \\\n"
        "                         mypackage.measures:readability --output difficulty\n"
        "as a job array:\n"
        "  mds-data analyze store --seq-length 1024 --task 3/8 --output difficulty\n"
        "  mds-data merge difficulty.task-* --output difficulty",
    )
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--output", type=Path, required=True, metavar="INDEX", help="a new folder")
    parser.add_argument(
        "--metric",
        nargs="+",
        default=["vocabulary-rarity"],
        metavar="M",
        help="length, vocabulary-rarity (sum over the tokens), mean-rarity, or a function of your "
        "own as module:function, given the ids (%(default)s)",
    )
    parser.add_argument(
        "--unit",
        choices=["sample", "document"],
        default="sample",
        help="what is measured: the samples that training takes, or documents (%(default)s)",
    )
    samples = parser.add_argument_group("which samples; as the training run has them")
    samples.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sample")
    samples.add_argument(
        "--split",
        metavar="PART",
        help="train, valid or test of the split that the store keeps; all when left out",
    )
    samples.add_argument(
        "--order", choices=["fast", "megatron"], default="fast", help="(%(default)s)"
    )
    samples.add_argument("--seed", type=int, default=1234, metavar="N", help="(%(default)s)")
    samples.add_argument(
        "--num-samples", type=int, metavar="N", help="samples; one epoch when left out"
    )
    add_engine_options(parser)
    parser.add_argument(
        "--task",
        metavar="I/N",
        help="measure part I of N of the samples only, as one task of a job array; merge joins "
        "them. For rarity each task counts the tokens of all",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the index if it exists")
