"""Where a process learns who it is among the ranks, and where torch.distributed starts and ends.

This is the only place that reads the environment: torchrun's and the deepspeed launcher's
variables, Slurm's under srun, MDS_* settings; without any of them a run is one process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from mds_train.errors import MachineError

if TYPE_CHECKING:
    import torch

__all__ = [
    "Environment",
    "assume_local_rank",
    "available_cores",
    "distributed",
    "extensions_folder",
    "first_host",
    "read_environment",
]

logger = logging.getLogger(__name__)

_SLURM_PORTS = range(20000, 60000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What the launcher says about this process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on this machine."""
    launcher: str = "none"
    """ "none", "torchrun" (and all that set its variables) or "slurm"."""
    master_address: str = "127.0.0.1"
    master_port: int = 0
    threads: int = 1
    """Threads of this rank's CPU work."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The MDS_* variables."""
    json_logs: bool = False

    @property
    def is_single_machine(self) -> bool:
        """Whether all ranks are here."""
        return self.local_world_size == self.world_size


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read who this process is.

    Args:
        variables: the environment; the process's own when left out.

    Raises:
        MachineError: If the launcher's variables are incomplete or no numbers.
    """
    variables = os.environ if variables is None else variables
    settings = {name: text for name, text in variables.items() if name.startswith("MDS_")}
    place = _place(variables)
    threads = _threads(variables, local_world_size=place.local_world_size)
    return Environment(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        launcher=place.launcher,
        master_address=place.master_address,
        master_port=place.master_port,
        threads=threads,
        settings=settings,
    )


def _place(variables: Mapping[str, str]) -> Environment:
    if "RANK" in variables:
        return _from_torchrun(variables)
    # Inside sbatch but outside srun, SLURM_PROCID is set too; only a step has a number of tasks.
    if "SLURM_PROCID" in variables and "SLURM_STEP_NUM_TASKS" in variables:
        return _from_slurm(variables)
    return Environment()


def _from_torchrun(variables: Mapping[str, str]) -> Environment:
    world_size = _number(variables, "WORLD_SIZE")
    local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in variables else "LOCAL_SIZE"
    return Environment(
        rank=_number(variables, "RANK"),
        world_size=world_size,
        local_rank=_number(variables, "LOCAL_RANK"),
        local_world_size=_number(variables, local_size, default=world_size),
        launcher="torchrun",
        master_address=variables.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(variables, "MASTER_PORT"),
    )


def _from_slurm(variables: Mapping[str, str]) -> Environment:
    hosts = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    job = _number(variables, "SLURM_JOB_ID", default=0)
    per_node = variables.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0].split(",")[0]
    world_size = _number(variables, "SLURM_STEP_NUM_TASKS")
    return Environment(
        rank=_number(variables, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(variables, "SLURM_LOCALID"),
        local_world_size=int(per_node) if per_node.isdigit() else world_size,
        launcher="slurm",
        master_address=variables.get("MASTER_ADDR") or first_host(hosts) or "127.0.0.1",
        master_port=_number(
            variables, "MASTER_PORT", default=_SLURM_PORTS[job % len(_SLURM_PORTS)]
        ),
    )


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm list like ``node[003-010,017],login1``."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\])?([^,\[]*)", hosts)
    if match is None:
        return ""
    prefix, numbers, suffix = match.groups()
    first = re.split(r"[-,]", numbers)[0] if numbers else ""
    return f"{prefix}{first}{suffix}"


def _number(variables: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is not None:
            return default
        raise MachineError(
            f"The launcher set no {name}. Start with torchrun, deepspeed or srun, or unset RANK "
            "for one process."
        )
    try:
        return int(text)
    except ValueError as error:
        raise MachineError(f"The environment variable {name} is {text!r}, not a number.") from error


def available_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads(variables: Mapping[str, str], *, local_world_size: int) -> int:
    """Share the cores among this machine's ranks, unless the user has chosen a number."""
    chosen = variables.get("OMP_NUM_THREADS", "")
    # torchrun sets 1 where nothing is set, which would leave most cores idle.
    by_torchrun = chosen == "1" and "TORCHELASTIC_RUN_ID" in variables
    if chosen.isdigit() and not by_torchrun:
        return max(1, int(chosen))
    return max(1, available_cores() // local_world_size)


def extensions_folder(variables: Mapping[str, str] | None = None) -> Path:
    """Return the folder of DeepSpeed's and torch's compiled extensions, one per environment.

    Two environments that share one folder load each other's binaries, and a build that was killed
    leaves a lock there on which the next one waits for ever.
    """
    variables = os.environ if variables is None else variables
    if given := variables.get("TORCH_EXTENSIONS_DIR"):
        return Path(given)
    cache = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
    return cache / "mds" / "torch_extensions" / f"py{platform.python_version()}-{place}"


@contextlib.contextmanager
def distributed(
    environment: Environment, *, device: str, timeout_seconds: float
) -> Iterator[torch.device]:
    """Start torch.distributed, hand out this rank's device, and end torch.distributed.

    Args:
        environment: who this process is.
        device: "cpu", "cuda" or "auto".
        timeout_seconds: a collective that waits longer fails; torch's default hangs half an hour.

    Raises:
        MachineError: If the device is missing or the ranks do not find each other.
    """
    chosen = _device(device, local_rank=environment.local_rank)
    with _variables(os.environ, _wanted(os.environ, environment, device_type=chosen.type)):
        yield from _connected(environment, device=chosen, timeout_seconds=timeout_seconds)


def _connected(
    environment: Environment, *, device: torch.device, timeout_seconds: float
) -> Iterator[torch.device]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(environment.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield device  # whoever started it ends it
        return
    _connect(environment, device=device, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield device
    except BaseException:
        # NCCL's teardown waits for ranks that may be gone; the end of the process frees it anyway.
        if device.type == "cpu":
            _disconnect(environment)
        raise
    _disconnect(environment)


def assume_local_rank(rank: int) -> None:
    """Say which rank of its machine this is, where nobody has: DeepSpeed does not start without.

    Args:
        rank: the rank in the whole job; the same on one machine.
    """
    os.environ.setdefault("LOCAL_RANK", str(rank))


def _disconnect(environment: Environment) -> None:
    import torch.distributed as dist

    # DeepSpeed keeps the first group that it sees for the life of the process. A group of one
    # holds nothing that must be given back, so a second run in this process may use it again.
    # Whoever else has ended it already, as a test may, leaves nothing to end.
    if environment.launcher != "none" and dist.is_initialized():
        dist.destroy_process_group()


def _device(name: str, *, local_rank: int) -> torch.device:
    import torch

    present = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not present):
        return torch.device("cpu")
    if not present:
        raise MachineError(
            'train.device is "cuda", but torch sees no CUDA device; use "cpu" or "auto", or look '
            "at `mds-train doctor`."
        )
    if local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"This machine has {torch.cuda.device_count()} CUDA devices, but this is its rank "
            f"number {local_rank}; start at most one rank a device."
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def _variables(variables: MutableMapping[str, str], wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while, those that are set already excepted."""
    added = {name: text for name, text in wanted.items() if name not in variables}
    variables.update(added)
    try:
        yield
    finally:
        for name in added:
            variables.pop(name, None)


def _wanted(
    variables: Mapping[str, str], environment: Environment, *, device_type: str
) -> dict[str, str]:
    """What torch and DeepSpeed read from the environment."""
    wanted = {
        "TORCH_EXTENSIONS_DIR": str(extensions_folder(variables)),
        "DS_ACCELERATOR": device_type,
        "RANK": str(environment.rank),
        "LOCAL_RANK": str(environment.local_rank),
        "WORLD_SIZE": str(environment.world_size),
        "MASTER_ADDR": environment.master_address,
        "MASTER_PORT": str(environment.master_port),
    }
    loopback = Path("/sys/class/net/lo")
    if environment.is_single_machine and loopback.exists():
        # Otherwise gloo resolves the host's name, which fails or hangs on many laptops.
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return wanted


def _connect(environment: Environment, *, device: torch.device, timeout: timedelta) -> None:
    import torch.distributed as dist

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    size, rank = environment.world_size, environment.rank
    if environment.launcher == "none":
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    logger.debug("Rank %d of %d waits for the others.", rank, size)
    try:
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timeout)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise MachineError(
            f"Rank {rank} of {size} could not meet the others at {environment.master_address}:"
            f"{environment.master_port} within {timeout.total_seconds():g} s: "
            f"{str(error).splitlines()[0]}. Check that all ranks were started and that the port is "
            "open."
        ) from error
