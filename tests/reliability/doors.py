"""Every command that opens a file or folder of somebody else's, each with a hostile one in it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Door", "doors", "furnish"]


@dataclass(frozen=True)
class Door:
    """A command."""

    name: str
    module: str
    argv: tuple[str, ...]
    lax: bool = False
    """It may do its work: it copies, signs or lists what it does not interpret."""

    waits: bool = False
    """What it reads is one's own, so it waits for a pipe as it should: `<(age-keygen -y key)`."""


def furnish(folder: Path) -> None:
    """What the commands need besides the hostile file: settings, a script, keys, some text."""
    (folder / "run.toml").write_text(SETTINGS)
    (folder / "pretrain.sh").write_text(SCRIPT)
    (folder / "text.jsonl").write_text('{"text": "some words"}\n')
    (folder / "passphrase").write_text("a passphrase of some length\n")


SCRIPT = """
python pretrain_gpt.py --num-layers 1 --hidden-size 8 --deepspeed --deepspeed_config ds.json
"""
SETTINGS = """
[model]
num_layers = 1
hidden_size = 16
num_attention_heads = 2
vocab_size = 64
max_position_embeddings = 16

[data]
store = "store"
seq_length = 16
split = "100,0,0"

[train]
run_dir = "a-run"
train_steps = 1
global_batch_size = 1
"""


def doors(hostile: Path, folder: Path) -> Iterator[Door]:
    """The commands, each with ``hostile`` where it expects something of the kind."""
    yield from _training(str(hostile), folder)
    yield from _checkpoints(str(hostile), folder)
    yield from _data(str(hostile), folder)


def _training(path: str, folder: Path) -> Iterator[Door]:
    store, good, out = str(folder / "store"), str(folder / "good"), str(folder / "out")
    run = str(folder / "run.toml")
    tuned = ["finetune", good, "--data", store, "--output", out]
    commands = {
        "generate": ["generate", path, "--prompt", "x"],
        "generate --adapter": ["generate", good, "--prompt", "x", "--adapter", path],
        "serve": ["serve", path, "--port", "0"],
        "serve --adapter": ["serve", good, "--port", "0", "--adapter", path],
        "evaluate": ["evaluate", "perplexity", path, "--data", store],
        "evaluate --data": ["evaluate", "perplexity", good, "--data", path],
        "evaluate --adapter": ["evaluate", "perplexity", good, "--data", store, "--adapter", path],
        "evaluate lambada": ["evaluate", "lambada", good, "--data", path],
        "finetune": ["finetune", path, *tuned[2:]],
        "finetune --data": ["finetune", good, "--data", path, "--output", out],
        "finetune --lora": [*tuned, "--lora.rank", "2", "--checkpoint.load", path],
        "resume": ["resume", path],
        "report": ["report", path],
        "run": ["run", path],
        "run --data.store": ["run", run, "--data.store", path],
        "run --checkpoint.load": ["run", run, "--checkpoint.load", path],
        "plan": ["plan", path],
        "launch": ["launch", path, "--launcher", "k8s", "--run-dir", out, "--print"],
    }
    for name, argv in commands.items():
        yield Door(f"mds-train {name}", "mds_train.cli", tuple(argv))
    # A script may be a script, and what it would run is only told.
    script = ("config", "import", str(folder / "pretrain.sh"), "--deepspeed-config", path)
    yield Door("mds-train config import", "mds_train.cli", ("config", "import", path), lax=True)
    yield Door("mds-train config import --deepspeed-config", "mds_train.cli", script, lax=True)


def _checkpoints(path: str, folder: Path) -> Iterator[Door]:
    good, out = str(folder / "good"), str(folder / "out")
    secret = ["--passphrase-file", str(folder / "passphrase")]
    commands = {
        "inspect": ["inspect", path],
        "inspect --stats": ["inspect", path, "--stats"],
        "verify": ["verify", path],
        "verify --to": ["verify", "--to", path],
        "verify, with a key": ["verify", path, *secret],
        "diff": ["diff", path, good],
        "convert": ["convert", path, out, "--to", "hf"],
        "convert --adapter": ["convert", good, out, "--to", "hf", "--adapter", path],
        "encrypt": ["encrypt", path, out, *secret],
        "decrypt": ["decrypt", path, out, *secret],
        "rotate-key": ["rotate-key", path, *secret, "--new-passphrase-file", secret[1]],
        "restore": ["restore", path, out],
        "ds-to-universal": ["ds-to-universal", "--input_folder", path, "--output_folder", out],
        "zero-to-fp32": ["zero-to-fp32", path, out],
        "inspect-checkpoint": ["inspect-checkpoint", path],
    }
    for name, argv in commands.items():
        yield Door(f"mds-ckpt {name}", "mds_ckpt.cli", tuple(argv))
    given = ("encrypt", good, out, "--recipients-file", path)
    yield Door("mds-ckpt encrypt --recipients-file", "mds_ckpt.cli", given, waits=True)
    lax = {"scan": ["scan", path], "backup": ["backup", path, "--to", str(folder / "place")]}
    lax["backup --to"] = ["backup", good, "--to", path]
    for name, argv in lax.items():
        yield Door(f"mds-ckpt {name}", "mds_ckpt.cli", tuple(argv), lax=True)
    # An extra that is installed in session `reliability` only.
    if importlib.util.find_spec("model_signing") is not None:
        yield from _signatures(path, folder)


def _signatures(path: str, folder: Path) -> Iterator[Door]:
    good, key = str(folder / "good"), str(folder / "signing.pem")
    new = ("--new-private-key", key, "--signature", str(folder / "out"))
    commands = {
        "verify --public-key": ("verify", good, "--public-key", path, "--signature", path),
        "sign --private-key": ("sign", good, "--private-key", path),
        "sign": ("sign", path, *new),
    }
    for name, argv in commands.items():
        yield Door(f"mds-ckpt {name}", "mds_ckpt.cli", argv, lax=name == "sign")


def _data(path: str, folder: Path) -> Iterator[Door]:
    store, text = str(folder / "store"), str(folder / "text.jsonl")
    out = ["--output", str(folder / "out")]
    secret = ["--passphrase-file", str(folder / "passphrase")]
    commands = {
        "inspect": ["inspect", path],
        "inspect --html": ["inspect", path, "--html", str(folder / "page.html")],
        "inspect --croissant": ["inspect", path, "--croissant", str(folder / "croissant.json")],
        "merge": ["merge", path, store, *out],
        "merge --rewrite": ["merge", store, path, "--rewrite", *out],
        "repack": ["repack", path, "--layout", "archive", *out],
        "split": ["split", path, "--split", "1,1,0", *out],
        "export": ["export", path, "--output-prefix", out[1]],
        "import": ["import", path, *out],
        "repair": ["repair", path, *out],
        "erase": ["erase", path, "--documents", "0", "--reason", "asked"],
        "erase --search": ["erase", path, "--documents", "0", "--reason", "x", "--search", path],
        "encrypt": ["encrypt", path, *out, *secret],
        "decrypt": ["decrypt", path, *out, *secret],
        "rotate-key": ["rotate-key", path, *secret, "--new-passphrase-file", secret[1]],
        "licences": ["licences", path],
        "licences --policy": ["licences", store, "--policy", path],
        "analyze": ["analyze", path, "--seq-length", "16", "--workers", "1", *out],
        "preprocess": ["preprocess", "--input", path, "--tokenizer", path, "--workers", "1", *out],
        "preprocess --tokenizer": [
            *("preprocess", "--input", text, "--tokenizer", path, "--workers", "1", *out),
        ],
    }
    for name, argv in commands.items():
        yield Door(f"mds-data {name}", "mds_data.cli", tuple(argv))
    yield Door("mds-data verify", "mds_data.cli", ("verify", path))
    given = ["--input", path, "--input-format", "jsonl", "--workers", "1", *out]
    lax = {
        # A file without a line is no documents, and lines that are none are counted and left out.
        "clean": ["clean", *given],
        "redact": ["redact", *given],
        "dedup": ["dedup", *given],
        "decontaminate": ["decontaminate", "--against", path, *given],
        "train-tokenizer": ["train-tokenizer", "--input", path, "--vocab-size", "300", *out],
    }
    for name, argv in lax.items():
        yield Door(f"mds-data {name}", "mds_data.cli", tuple(argv), lax=True)
