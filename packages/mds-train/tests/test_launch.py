from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mds_train.errors import MachineError
from mds_train.launch import available_cores, extensions_folder, first_host, read_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "OMP_NUM_THREADS": "1",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "123456",
}


def test_without_a_launcher_a_run_is_one_process_with_all_cores() -> None:
    environment = read_environment({})

    assert (environment.rank, environment.world_size) == (0, 1)
    assert environment.threads == available_cores()
    assert environment.is_single_machine


def test_torchrun_is_read_and_its_one_thread_is_not_taken_for_a_wish() -> None:
    environment = read_environment(TORCHRUN)

    assert (environment.rank, environment.world_size) == (5, 8)
    assert (environment.local_rank, environment.local_world_size) == (1, 4)
    assert (environment.master_address, environment.master_port) == ("host0", 29500)
    assert environment.threads == max(1, available_cores() // 4)
    assert not environment.is_single_machine


def test_a_chosen_number_of_threads_is_kept() -> None:
    assert read_environment({**TORCHRUN, "OMP_NUM_THREADS": "3"}).threads == 3
    assert read_environment({"OMP_NUM_THREADS": "1"}).threads == 1


def test_the_deepspeed_launcher_names_the_local_size_otherwise() -> None:
    variables = {key: text for key, text in TORCHRUN.items() if key != "LOCAL_WORLD_SIZE"}

    assert read_environment({**variables, "LOCAL_SIZE": "2"}).local_world_size == 2


def test_srun_is_read_and_all_ranks_agree_on_the_meeting_place() -> None:
    first, other = read_environment({**SLURM, "SLURM_PROCID": "0"}), read_environment(SLURM)

    assert (other.rank, other.world_size, other.local_world_size) == (5, 8, 4)
    assert other.master_address == first.master_address == "gpu007"
    assert other.master_port == first.master_port
    assert 20000 <= other.master_port < 60000


def test_a_batch_script_outside_srun_is_one_process() -> None:
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}

    assert read_environment(variables).world_size == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[003-010,017],login1", "node003"),
        ("node[3,5]", "node3"),
        ("a1,a2", "a1"),
        ("alone", "alone"),
        ("rack[1-2]-ib", "rack1-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_half_an_environment_is_refused() -> None:
    with pytest.raises(MachineError, match="set no WORLD_SIZE"):
        read_environment({"RANK": "0"})
    with pytest.raises(MachineError, match="WORLD_SIZE is 'two', not a number"):
        read_environment({**TORCHRUN, "WORLD_SIZE": "two"})


def test_only_our_variables_are_settings() -> None:
    environment = read_environment({"MDS_TRAIN__SEED": "7", "HOME": "/root"})

    assert environment.settings == {"MDS_TRAIN__SEED": "7"}


def test_compiled_extensions_have_a_folder_for_each_environment(tmp_path: Path) -> None:
    chosen = extensions_folder({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    own = extensions_folder({"XDG_CACHE_HOME": str(tmp_path)})

    assert chosen == tmp_path
    assert own.parent == tmp_path / "mds" / "torch_extensions"


RANKS = """\
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from mds_train.launch import distributed, read_environment

environment = read_environment()
before = dict(os.environ)
with distributed(environment, device="cpu", timeout_seconds=60) as device:
    total = torch.tensor(float(environment.rank + 1), device=device)
    dist.all_reduce(total)
    inside = os.environ["DS_ACCELERATOR"], torch.get_num_threads() == environment.threads
seen = [total.item(), *inside, dist.is_initialized(), dict(os.environ) == before]
Path(sys.argv[1], f"rank-{environment.rank}").write_text(" ".join(map(str, seen)))
"""


@pytest.mark.timeout(120)
def test_two_ranks_of_torchrun_meet_and_part(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(script), str(tmp_path)]

    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=110, check=False
    )

    assert done.returncode == 0, done.stderr
    # A file a rank: what two ranks print into one pipe may be mixed.
    told = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == ["3.0 cpu True False True"] * 2
