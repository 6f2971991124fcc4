"""New tokens per second beside transformers' generate, greedy, on the same weights.

    python packages/mds-train/benchmarks/generate.py [--sizes small medium large] [--rounds 3]

Both continue the same random prompts, in turn; the ratio is that of the medians. transformers pads
a batch of unequal prompts on the left, ours holds each in a slot of its own. The prompts of
"unequal" have 16 to 128 tokens, all others 64. The tokens must be equal, or the run stops.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from mds_train.generate import generate, load_model

SIZES = {  # layers, hidden, heads, vocabulary
    "small": (4, 128, 4, 8192),
    "medium": (6, 384, 6, 32768),
    "large": (12, 768, 12, 50257),
}
NEW = 32
CASES = {"1 prompt": [64], "8 prompts": [64] * 8, "8 unequal": [16, 128, 32, 96, 48, 64, 112, 24]}


def write_model(folder: Path, size: str) -> None:
    layers, hidden, heads, vocabulary = SIZES[size]
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=256,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        initializer_range=0.2,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def their_way(model: torch.nn.Module, prompts: list[list[int]]) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(  # type: ignore[operator]
        torch.tensor(padded),
        attention_mask=torch.tensor(mask),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return [row[longest:] for row in output.tolist()]


def seconds(action: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    tokens = action()
    return time.perf_counter() - start, tokens


def compare(size: str, *, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name), size)
        ours = load_model(name)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(name).eval()
    theirs.generation_config.eos_token_id = None
    vocabulary, random = SIZES[size][3], torch.Generator().manual_seed(5)
    for case, lengths in CASES.items():
        prompts = [
            torch.randint(1, vocabulary, (length,), generator=random).tolist() for length in lengths
        ]
        ways = {
            "ours": lambda prompts=prompts: generate(ours, prompts, max_new_tokens=NEW),
            "theirs": lambda prompts=prompts: their_way(theirs, prompts),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            answers = {}
            for way, action in ways.items():
                spent, answers[way] = seconds(action)
                if turn:  # the first warms up
                    times[way].append(spent)
            if answers["ours"] != answers["theirs"]:
                raise SystemExit(f"{size}, {case}: the tokens differ, so the times mean nothing")
        medians = {way: statistics.median(spent) for way, spent in times.items()}
        count = NEW * len(prompts)
        line = {
            "size": size,
            "case": case,
            "ours_tokens_per_second": round(count / medians["ours"], 1),
            "theirs_tokens_per_second": round(count / medians["theirs"], 1),
            "speedup": round(medians["theirs"] / medians["ours"], 2),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads, machine = torch.get_num_threads(), platform.machine()
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}, "
        f"{threads} threads, {NEW} new tokens a prompt"
    )
    for size in options.sizes:
        compare(size, rounds=options.rounds)


if __name__ == "__main__":
    main()
