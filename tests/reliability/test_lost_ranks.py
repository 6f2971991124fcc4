"""A rank that is killed or stopped: the others end, and say which one, in which step, at what.

A few places always; all of them with the environment variable MDS_RELIABILITY=full.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mds_ckpt import commit
from mds_data import write_store

pytestmark = pytest.mark.timeout(300)

DRIVER = Path(__file__).with_name("failing_rank.py")
FULL = os.environ.get("MDS_RELIABILITY") == "full"
LASTS = {
    "forward": "forward and backward of step 3",
    "all-reduce": "update of step 3",
    "save": "save of step 3",
    "eval": "validation of step 3",
}
CASES = [(place, number) for number in ("SIGKILL", "SIGSTOP") for place in LASTS]
ALWAYS = [("all-reduce", "SIGKILL"), ("save", "SIGSTOP")]

CONFIG = """
[model]
num_layers = 1
hidden_size = 16
num_attention_heads = 2
vocab_size = 64
max_position_embeddings = 16

[data]
store = "store"
seq_length = 16
split = "80,20,0"

[train]
run_dir = "run"
train_steps = 6
global_batch_size = 4

[parallel]
timeout_seconds = 15.0

[checkpoint]
save_interval = 3

[watch]
eval_interval = 3
eval_samples = 4
tensorboard = false
curves = false
"""


@contextmanager
def ranks(folder: Path, arguments: Sequence[str], *, size: int) -> Iterator[list[subprocess.Popen]]:
    """Start ranks as torchrun would, and leave none behind."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(DRIVER), "run.toml", *arguments],
            cwd=folder,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize(("place", "number"), CASES if FULL else ALWAYS)
def test_the_others_end_and_name_the_lost_rank(tmp_path: Path, place: str, number: str) -> None:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 64, 40) for _ in range(20)]
    write_store(tmp_path / "store", documents, vocab_size=64, eod_id=0)
    (tmp_path / "run.toml").write_text(CONFIG)

    with ranks(tmp_path, ["1", place, number], size=2) as (first, second):
        _, printed = first.communicate(timeout=200)
        code, lost_pid = first.returncode, second.pid

    assert code == 4, printed
    fate = "is gone, last seen" if number == "SIGKILL" else "has not moved for"
    assert f"rank 1 (process {lost_pid} on {socket.gethostname()}) {fate}" in printed
    assert f"in the {LASTS[place]}" in printed
    assert "Traceback" not in printed
    # What was not committed is not there.
    complete = commit.find_latest(tmp_path / "run" / "checkpoints").folder
    assert complete is None
