"""Runs over two hosts on a virtual network: each launcher, a host that is cut off, a new start.

With the environment variable MDS_RELIABILITY=full only; as root, on Linux.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from virtual_hosts import Hosts, virtual_hosts, why_impossible

from mds_data import write_store
from mds_train import cli
from mds_train.watch import read_metrics

pytestmark = pytest.mark.timeout(600)

if os.environ.get("MDS_RELIABILITY") != "full":
    pytest.skip("runs with MDS_RELIABILITY=full", allow_module_level=True)
if why := why_impossible():
    pytest.skip(f"no virtual hosts: {why}", allow_module_level=True)

TIMEOUT = 15
CONFIG = f"""
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
vocab_size = 64
max_position_embeddings = 16

[data]
store = "store"
seq_length = 16

[train]
train_steps = 6
global_batch_size = 8
micro_batch_size = 2
run_dir = "run"

[optimizer]
lr = 1e-2

[parallel]
timeout_seconds = {TIMEOUT}.0

[watch]
log_interval = 1
tensorboard = false
curves = false
"""
PORT = 29400
LOSS = 2e-6
"""Relative, as numerics.md has it for other layouts in fp32."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with virtual_hosts() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(3)
    documents = [random.integers(0, 64, 40) for _ in range(40)]
    write_store(tmp_path / "store", documents, vocab_size=64, eod_id=0, split="100,0,0")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def losses_of(run: Path) -> list[float]:
    return [entry["loss"] for entry in read_metrics(run / "metrics.jsonl").train]


def losses_of_one_process(folder: Path, *, steps: int) -> list[float]:
    run = folder / "alone"
    words = ["--data.store", str(folder / "store"), "--train.run-dir", str(run)]
    words += ["--train.train-steps", str(steps)]
    assert cli.main(["run", str(folder / "run.toml"), *words]) == 0
    return losses_of(run)


def torchrun(hosts: Hosts, host: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.addresses[0]}:{PORT}"),
        *("--rdzv-id=job", f"--rdzv-conf=is_host={int(host == 0)}"),
        f"--local-addr={hosts.addresses[host]}",
        *("--max-restarts=0", "-m", "mds_train", "run", "run.toml", *arguments),
    ]
    return hosts.start(host, words, folder=folder, environment={})


def deepspeed(hosts: Hosts, host: int, folder: Path) -> subprocess.Popen[str]:
    words = [
        *("-m", "deepspeed.launcher.runner", "--hostfile", "hostfile", "--no_ssh"),
        *("--node_rank", str(host), "--master_addr", hosts.addresses[0]),
        *("--master_port", str(PORT + 10), "--module", "mds_train", "run", "run.toml"),
    ]
    accelerator = {"DS_ACCELERATOR": "cpu"}
    return hosts.start(host, words, folder=folder, environment=accelerator)


def supervisor(hosts: Hosts, host: int, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    words = [
        *("-m", "mds_train.jobs.supervisor", "--machine", str(host), "--machines", "2"),
        *("--head", hosts.addresses[0], "--address", hosts.addresses[host]),
        *("--patience", "20", "--grace", str(3 * TIMEOUT), "--restarts", "2", "--"),
        *("run", "run.toml", "--checkpoint.load", "run", "--checkpoint.from-scratch-if-missing"),
        *arguments,
    ]
    return hosts.start(host, words, folder=folder, environment={})


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """What a process prints up to a line that has this text."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return seen
    pytest.fail(f"never printed {text!r}:\n{''.join(seen)[-4000:]}")


@pytest.mark.parametrize("launcher", [torchrun, deepspeed], ids=["torchrun", "deepspeed --no_ssh"])
def test_a_launcher_over_the_network_trains_what_one_process_does(
    hosts: Hosts, folder: Path, launcher: functools.partial[subprocess.Popen[str]]
) -> None:
    (folder / "hostfile").write_text("".join(f"{each} slots=1\n" for each in hosts.addresses))

    first, second = (launcher(hosts, host, folder) for host in (0, 1))
    printed, _ = first.communicate(timeout=300)
    second.communicate(timeout=60)

    assert (first.returncode, second.returncode) == (0, 0), printed[-4000:]
    assert losses_of(folder / "run") == pytest.approx(
        losses_of_one_process(folder, steps=6), rel=LOSS
    )


def test_when_a_host_is_cut_off_the_other_ends_in_time(hosts: Hosts, folder: Path) -> None:
    long = ("--train.train-steps", "100000", "--checkpoint.save-final", "false")
    first, second = (torchrun(hosts, host, folder, *long) for host in (0, 1))
    try:
        read_until(first, "step      3/100000")
        hosts.cut(1)
        # torch's default would be silent for half an hour.
        printed, _ = first.communicate(timeout=10 * TIMEOUT)
    finally:
        hosts.restore(1)
        hosts.end_all(1)
        second.communicate()

    assert first.returncode != 0
    # Both wait for each other at the same place, so neither is known to be behind.
    assert "error: Rank 0 could not go on with the " in printed, printed[-4000:]
    assert " of step " in printed
    assert "look at the network between the machines" in printed
    assert f"Timed out waiting {TIMEOUT}000ms" in printed
    assert "Traceback" not in printed.split("failed (exitcode: 4)")[0]


def test_the_job_goes_on_with_the_hosts_that_answer(hosts: Hosts, folder: Path) -> None:
    steps = 60
    long = ("--train.train-steps", str(steps), "--checkpoint.save-interval", "5")
    first, second = (supervisor(hosts, host, folder, *long) for host in (0, 1))
    try:
        read_until(first, "step 12/60")
        hosts.cut(1)
        printed, _ = first.communicate(timeout=400)
    finally:
        hosts.restore(1)
        hosts.end_all(1)
        second.communicate()

    assert first.returncode == 0, printed[-4000:]
    assert "This start ends: machine 1 has not been heard of" in printed or "ended with" in printed
    assert "Start 1 on 1 machines" in printed
    history = read_metrics(folder / "run" / "metrics.jsonl")
    assert [entry["step"] for entry in history.train] == list(range(1, steps + 1))
    assert {entry["batch_samples"] for entry in history.train} == {8}
    assert history.resume_steps[-1] >= 10
    assert history.resume_steps[-1] % 5 == 0
    expected = losses_of_one_process(folder, steps=steps)
    assert losses_of(folder / "run") == pytest.approx(expected, rel=1e-4)


def test_a_host_that_comes_back_takes_part_in_the_next_start(hosts: Hosts, folder: Path) -> None:
    long = ("--train.train-steps", "100000", "--checkpoint.save-interval", "5")
    first, second = (supervisor(hosts, host, folder, *long) for host in (0, 1))
    try:
        read_until(first, "step      7/100000")
        for process in processes_of(second):  # the ranks die, their supervisor lives
            subprocess.run(["kill", "-9", process], check=False)
        seen = read_until(first, "Start 1 on 2 machines")
        assert any("machine 1 failed with code" in line or "ended with" in line for line in seen)
        read_until(first, "Resuming at step")
    finally:
        for host, process in enumerate((first, second)):
            hosts.end_all(host)
            process.communicate()


def processes_of(supervised: subprocess.Popen[str]) -> list[str]:
    """The ranks below a supervisor: children of its torchrun."""
    (launcher,) = children(str(supervised.pid))
    return children(launcher)


def children(process: str) -> list[str]:
    found = subprocess.run(["pgrep", "-P", process], capture_output=True, text=True, check=False)
    return found.stdout.split()
