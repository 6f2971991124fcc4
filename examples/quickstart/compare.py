"""The checks of the quickstart: does the export compute the same, did the model learn anything?

python compare.py logits --checkpoint runs/quickstart/run/checkpoints --model runs/quickstart/hf
python compare.py entropy --store runs/quickstart/store
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mds_data import GPTDataset, TokenStore, open_store
from mds_train.generate import load_model

LOGIT_TOLERANCE = 1e-5


def unigram_entropy(store: TokenStore) -> float:
    """Return the entropy of the store's token frequencies in nats.

    It is the loss of the best model that knows how frequent tokens are, and nothing of their order.
    """
    counts = np.zeros(store.vocab_size, dtype=np.int64)
    for document in range(len(store)):
        counts += np.bincount(store[document], minlength=store.vocab_size)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


@torch.no_grad()
def largest_logit_difference(checkpoint: Path, model: Path, *, store: Path) -> float:
    """Return the largest difference between our logits and transformers', on held-out samples."""
    dataset = GPTDataset(open_store(store), seq_length=128, split="valid")
    tokens = torch.stack([torch.as_tensor(dataset[i]["tokens"]) for i in range(4)])
    ours = load_model(checkpoint).eval()(tokens)
    theirs = AutoModelForCausalLM.from_pretrained(model).eval()(input_ids=tokens).logits
    return float((ours - theirs).abs().max())


def main() -> int:
    """Print one JSON object; exit with 1 when the logits differ."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["logits", "entropy"])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--store", type=Path, required=True)
    options = parser.parse_args()
    if options.what == "entropy":
        sys.stdout.write(
            json.dumps({"unigram_entropy": unigram_entropy(open_store(options.store))})
        )
        return 0
    difference = largest_logit_difference(options.checkpoint, options.model, store=options.store)
    sys.stdout.write(json.dumps({"largest_logit_difference": difference}))
    return 0 if difference <= LOGIT_TOLERANCE else 1


if __name__ == "__main__":
    raise SystemExit(main())
