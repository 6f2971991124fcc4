"""The command ``mds-train finetune``."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["EXAMPLES", "USAGE", "add_arguments"]

USAGE = (
    "%(prog)s MODEL --data STORE --output RUN_DIR [--epochs N] [--merge] [--print-config] "
    "[overrides]"
)
EXAMPLES = """\
examples:
  mds-train finetune ./Llama-3-8B --data chat --output runs/chat
  mds-train finetune runs/base --data chat --output runs/chat --epochs 3 --lr 1e-5
  torchrun --nproc-per-node 8 -m mds_train finetune ./model --data chat --output runs/chat \\
      --parallel.zero-stage 3
  mds-train finetune ./Llama-3-8B --data chat --output runs/lora --lora.rank 16 --merge

The model's shape is read from MODEL, a checkpoint of any format or the folder of a run. Of
conversations (`mds-data preprocess-sft`) the answers are learned, of texts everything. Every
setting of `mds-train run` may follow, and `mds-train resume RUN_DIR` goes on.

With --lora.rank small adapters are trained and the weights rest (also --lora.alpha, --lora.dropout,
--lora.targets linear_qkv linear_proj). Checkpoints then hold the adapters alone, RUN_DIR/adapter
has them for the peft library, and `mds-train generate RUN_DIR` uses both.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; settings of the run may follow."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="where the weights come from")
    parser.add_argument("--data", type=Path, required=True, metavar="STORE", help="what is learned")
    parser.add_argument("--output", type=Path, required=True, metavar="RUN_DIR", help="the new run")
    parser.add_argument(
        "--epochs", type=float, default=2.0, metavar="N", help="passes over the data (%(default)g)"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="with --lora.rank: write the model with the adapters in it to RUN_DIR/merged",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print each setting with its origin and stop"
    )
