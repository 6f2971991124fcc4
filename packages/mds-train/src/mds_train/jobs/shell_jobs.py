"""Job files that are shell scripts: one machine, torchrun, DeepSpeed's launcher, Slurm, MPI."""

from __future__ import annotations

from mds_train.jobs.job import UNNAMED, Job

__all__ = ["deepspeed", "local", "mpi", "slurm", "torchrun"]

_HEAD = "#!/usr/bin/env bash\n"
_STRICT = "set -euo pipefail\n"


def local(job: Job) -> dict[str, str]:
    """All ranks on this machine; one process needs no launcher."""
    program: tuple[str, ...] = ("mds-train",)
    if job.processes > 1:
        program = ("torchrun", "--standalone", f"--nproc-per-node={job.processes}", *_MODULE)
    text = f"{_HEAD}# {job.name}: on this machine, {job.processes} ranks.\n{_STRICT}{job.exports()}"
    return {f"{job.name}.sh": f"{text}exec {job.command(program)}\n"}


_MODULE = ("-m", "mds_train")


def torchrun(job: Job) -> dict[str, str]:
    """The script to start on every machine, the first one with 0.

    A supervisor on each starts torchrun, and starts the whole job again under a new rendezvous id
    on the machines that answer: torchrun's elastic restart loses the job when a machine that was
    cut off comes back.
    """
    program = (
        *("python", "-m", "mds_train.jobs.supervisor"),
        "--machine=@RANK@",
        f"--machines={job.nodes}",
        "--head=@HEAD@",
        "--address=@ADDRESS@",
        f"--port={job.port}",
        f"--processes={job.processes}",
        f"--fewest={job.fewest}",
        f"--restarts={job.restarts}",
        "--",
    )
    command = job.command(program)
    for mark, shell in (("@RANK@", "$rank"), ("@HEAD@", "$head"), ("@ADDRESS@", "$address")):
        command = command.replace(mark, f'"{shell}"')
    return {
        f"{job.name}.sh": f"""{_HEAD}\
# {job.name}: {job.nodes} machines with {job.processes} ranks each. On every machine:
#   ./{job.name}.sh 0    (on {job.host}; 1, 2 ... on the others, at the same time)
# The environment variable ADDRESS names this machine's address in the training network, HEAD that
# of the first machine, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME the interface of that network.
{_STRICT}\
rank="${{1:?say which machine this is: 0 for the first one}}"
head="{job.head}"
address="${{ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}}"
{job.exports()}\
exec {command}
"""
    }


def deepspeed(job: Job) -> dict[str, str]:
    """DeepSpeed's launcher with a host file and without ssh: the script runs on every machine."""
    program = (
        "deepspeed",
        *("--hostfile", "hostfile", "--no_ssh", "--node_rank", "@RANK@"),
        *("--master_addr", "@HEAD@", "--master_port", str(job.port)),
        *("--module", "mds_train"),
    )
    command = job.command(program).replace("@RANK@", '"$rank"').replace("@HEAD@", '"$head"')
    script = f"""{_HEAD}\
# {job.name}: {job.nodes} machines. Write their names into hostfile, then on every machine:
#   ./{job.name}.sh 0    (on the first one; 1, 2 ... on the others, at the same time)
{_STRICT}\
rank="${{1:?say which machine this is: 0 for the first one}}"
head="{job.head}"
cd "$(dirname "$0")"
{job.exports()}\
exec {command}
"""
    return {f"{job.name}.sh": script, "hostfile": _hostfile(job)}


def slurm(job: Job) -> dict[str, str]:
    """A batch script: srun starts the ranks, which read Slurm's variables themselves.

    Three minutes before its time is over the job saves and ends. Submitted several times, one
    follows the other and goes on.
    """
    hours, minutes = divmod(job.minutes, 60)
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.processes}",
        f"--cpus-per-task={job.cpus}",
        *([f"--gpus-per-node={job.processes}"] if job.use_gpu else []),
        *([f"--partition={job.queue}"] if job.queue else []),
        *([f"--account={job.account}"] if job.account else []),
        f"--time={hours:02d}:{minutes:02d}:00",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        "--signal=TERM@180",
        "--dependency=singleton",
        f"--output={job.name}-%j.log",
    ]
    header = "".join(f"#SBATCH {option}\n" for option in options)
    srun: tuple[str, ...] = ("srun", "--kill-on-bad-exit=1", f"--cpus-per-task={job.cpus}")
    if job.mounts:
        places = ",".join(f"{mount.source}:{mount.path}" for mount in job.mounts)
        if not job.is_mounted(job.config):
            places += f",{job.config}:{job.config}:ro"
        srun = (*srun, f"--container-image={job.image}", f"--container-mounts={places}")
    return {
        f"{job.name}.sbatch": f"""{_HEAD}{header}\
# Submit it {job.restarts + 1} times for runs longer than one job: sbatch {job.name}.sbatch
# Jobs of one name run one after the other; each goes on from the newest checkpoint.
{_STRICT}\
export OMP_NUM_THREADS={job.cpus}
{job.exports()}\
{job.command((*srun, "mds-train"))}
"""
    }


def mpi(job: Job) -> dict[str, str]:
    """Mpirun of Open MPI; a line of shell turns its variables into those that torch reads."""
    ranks = (
        'export RANK="$OMPI_COMM_WORLD_RANK" WORLD_SIZE="$OMPI_COMM_WORLD_SIZE" '
        'LOCAL_RANK="$OMPI_COMM_WORLD_LOCAL_RANK" LOCAL_WORLD_SIZE="$OMPI_COMM_WORLD_LOCAL_SIZE"; '
        'exec mds-train "$@"'
    )
    names = [*job.variables, *job.secrets, "MASTER_ADDR", "MASTER_PORT"]
    program = (
        *("mpirun", "--hostfile", "hostfile", "-np", str(job.world_size)),
        *("--map-by", f"ppr:{job.processes}:node:PE={job.cpus}"),
        *(word for name in names for word in ("-x", name)),
        *("bash", "-c", ranks, "mds-train"),
    )
    script = f"""{_HEAD}\
# {job.name}: {job.nodes} machines with {job.processes} ranks each. Write their names into hostfile.
{_STRICT}\
MASTER_ADDR="{job.head}"
export MASTER_ADDR MASTER_PORT={job.port}
cd "$(dirname "$0")"
{job.exports()}\
# The ranks' own variables are read where the ranks are.
# shellcheck disable=SC2016
exec {job.command(program)}
"""
    return {f"{job.name}.sh": script, "hostfile": _hostfile(job)}


def _hostfile(job: Job) -> str:
    first = "localhost" if job.nodes == 1 and job.host == UNNAMED else job.host
    hosts = [first, *(f"{first}-{number}" for number in range(1, job.nodes))]
    return "".join(f"{host} slots={job.processes}\n" for host in hosts)
