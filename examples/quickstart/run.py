"""The main job on real text, each step one command that you can type yourself.

    python examples/quickstart/run.py --folder runs/quickstart

Text that every Python carries becomes a token store, a GPT of about 10 million parameters trains on
it, first on one process, then resumed on two with tensor parallel 2, and the result is checked,
exported and used. What is there already is not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
STEPS = 240
HALF = STEPS // 2
EARLY = 40
TOLERANCE = 2e-3
LEARNED = 0.5  # nats under the unigram entropy


class StepFailedError(RuntimeError):
    """A command of the quickstart did not do what it should."""


@dataclass
class Quickstart:
    """The folder, and what was found out on the way."""

    folder: Path
    found: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Write a heading with the time since the start."""
        sys.stdout.write(f"\n[{time.monotonic() - self.started:5.0f} s] {text}\n")
        sys.stdout.flush()

    def call(self, *command: object, capture: bool = False) -> str:
        """Run one Python command, shown as a person would type it.

        Raises:
            StepFailedError: If it does not end with exit code 0.
        """
        words = [str(word) for word in command]
        sys.stdout.write(f"$ {as_typed(words)}\n")
        sys.stdout.flush()
        output = subprocess.PIPE if capture else None
        done = subprocess.run([sys.executable, *words], check=False, text=True, stdout=output)
        if done.returncode:
            raise StepFailedError(f"Exit code {done.returncode} from: {as_typed(words)}")
        return done.stdout or ""

    def unless(self, made: Path, make: Callable[[], object]) -> None:
        """Make something, or say that it is there."""
        if made.exists():
            sys.stdout.write(f"{made} is there already; it is used as it is.\n")
        else:
            make()


def as_typed(words: list[str]) -> str:
    """Return a command line: paths relative to here, modules by the name of their program."""
    here = f"{Path.cwd()}{os.sep}"
    line = shlex.join([word.removeprefix(here) for word in words])
    line = line.replace("-m torch.distributed.run", "torchrun")
    if line.startswith("-m mds_"):
        return line.removeprefix("-m ").replace("_", "-", 1)
    return line if line.startswith("torchrun") else f"python {line}"


def text_to_store(work: Quickstart) -> None:
    """Corpus, tokenizer, store."""
    corpus, tokenizer, store = (
        work.folder / n for n in ("corpus.jsonl", "tokenizer.json", "store")
    )
    work.say("1. English text that every Python carries")
    work.unless(corpus, lambda: work.call("-m", "mds_data", "sample-corpus", "--output", corpus))
    work.say("2. A byte-level BPE tokenizer of 8192 tokens")
    train = ("train-tokenizer", "--input", corpus, "--vocab-size", 8192, "--output", tokenizer)
    work.unless(tokenizer, lambda: work.call("-m", "mds_data", *train))
    work.say("3. A token store: 95 % to train on, 5 % to validate")
    where = ("--input", corpus, "--output", store, "--tokenizer", tokenizer)
    how = ("--append-eod", "--split", "95,5,0", "--workers", 2)
    work.unless(store, lambda: work.call("-m", "mds_data", "preprocess", *where, *how))
    work.call("-m", "mds_data", "inspect", store)
    entropy = work.call(HERE / "compare.py", "entropy", "--store", store, capture=True)
    work.found["unigram entropy"] = json.loads(entropy)["unigram_entropy"]


def train(work: Quickstart) -> None:
    """Half of the steps on one process, the other half resumed on two."""
    run, store = work.folder / "run", work.folder / "store"
    checkpoints = run / "checkpoints"
    work.say(f"4. Train a small GPT on one process, up to step {HALF} of {STEPS}")
    paths = ("--train.run-dir", run, "--data.store", store)
    steps = ("--train.train-steps", STEPS, "--train.exit-step", HALF)
    config = HERE.parent / "quickstart.toml"
    first = ("-m", "mds_train", "run", config, *paths, *steps)
    work.unless(checkpoints / f"step-{HALF}", lambda: work.call(*first))
    work.say("5. Resume the same run on two processes with tensor parallel 2")
    two = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "mds_train")
    second = (*two, "resume", run, "--parallel.tp-size", 2, "--train.exit-step", STEPS)
    work.unless(checkpoints / f"step-{STEPS}", lambda: work.call(*second))
    losses = validation_losses(run)
    work.found[f"validation loss, step {EARLY}"] = losses[EARLY]
    work.found["validation loss, end"] = losses[STEPS]


def validation_losses(run: Path) -> dict[int, float]:
    """Return the validation loss after each step that has one, from the run's metrics."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "validation"}


def compare_with_plain_torch(work: Quickstart) -> None:
    """The same model, data and steps in plain torch."""
    run, initial = work.folder / "run", work.folder / "hf-initial"
    result = work.folder / "plain_torch.json"
    work.say("6. The same model, data and steps in plain torch, to compare with")
    export = ("convert", run / "checkpoints" / "step-0", initial, "--to", "hf")
    work.unless(initial, lambda: work.call("-m", "mds_ckpt", *export))
    peer = (HERE / "plain_torch.py", "--model", initial, "--run", run, "--output", result)
    work.unless(result, lambda: work.call(*peer))
    losses = json.loads(result.read_text())["validation"]
    work.found[f"plain torch, step {EARLY}"] = losses[str(EARLY)]
    work.found["plain torch, end"] = losses[str(STEPS)]


def export(work: Quickstart) -> None:
    """Look at the checkpoint, verify it, convert it, and let transformers load it."""
    newest, hf = work.folder / "run" / "checkpoints" / f"step-{STEPS}", work.folder / "hf"
    work.say("7. Look at the checkpoint, verify every byte, convert it for Hugging Face")
    work.call("-m", "mds_ckpt", "inspect", newest)
    work.call("-m", "mds_ckpt", "verify", newest)
    work.unless(hf, lambda: work.call("-m", "mds_ckpt", "convert", newest, hf, "--to", "hf"))
    work.say("8. transformers loads it and computes the same logits")
    check = ("logits", "--checkpoint", newest, "--model", hf, "--store", work.folder / "store")
    answer = work.call(HERE / "compare.py", *check, capture=True)
    work.found["largest logit difference"] = json.loads(answer)["largest_logit_difference"]


def generate(work: Quickstart) -> None:
    """A continuation."""
    work.say("9. Let it write")
    newest = work.folder / "run" / "checkpoints" / f"step-{STEPS}"
    settings = ("--prompt", "The function returns", "--max-new-tokens", 40, "--temperature", 0.7)
    work.call("-m", "mds_train", "generate", newest, *settings)


def conclude(work: Quickstart) -> None:
    """Say what was made, whether it is right, and what to try next.

    Raises:
        StepFailedError: If the losses are not what they must be.
    """
    work.say("Done. What was found:")
    for name, value in work.found.items():
        sys.stdout.write(
            f"    {name:<32} {value:.3g}\n" if value < 0.01 else f"    {name:<32} {value:.4f}\n"
        )
    ours = work.found["validation loss, end"]
    for when in (f"step {EARLY}", "end"):
        mine, plain = work.found[f"validation loss, {when}"], work.found[f"plain torch, {when}"]
        if not abs(mine - plain) <= TOLERANCE:
            raise StepFailedError(f"{when}: {mine} and {plain} differ by more than {TOLERANCE}.")
    if not ours < work.found["unigram entropy"] - LEARNED:
        raise StepFailedError(f"The validation loss {ours} is not well under the unigram entropy.")
    sys.stdout.write(CONCLUSION.format(folder=os.path.relpath(work.folder)))


CONCLUSION = """
What was made, and where:
    {folder}/store               the token store (open_store in Python, any Zarr reader too)
    {folder}/run/curves.png      loss curves; numbers in metrics.jsonl, TensorBoard in tensorboard/
    {folder}/run/checkpoints     checkpoints that resume on any layout
    {folder}/hf                  the model for transformers

What to try next:
    mds-train generate {folder}/run/checkpoints --prompt "A class that"
    mds-train run examples/quickstart.toml --data.store {folder}/store \\
        --train.run-dir runs/longer --train.train-steps 2000
    mds-ckpt diff {folder}/hf-initial {folder}/hf
"""


def main() -> int:
    """Run all steps and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    work = Quickstart(parser.parse_args().folder.resolve())
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        for step in (text_to_store, train, compare_with_plain_torch, export, generate, conclude):
            step(work)
    except StepFailedError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
