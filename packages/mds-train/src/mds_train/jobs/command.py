"""The command ``mds-train launch``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mds_train.errors import ExitCode, InputError, UsageError
from mds_train.jobs import cloud_jobs, shell_jobs
from mds_train.jobs.job import Job, Mount

__all__ = ["EXAMPLES", "LAUNCHERS", "add_arguments", "write_job"]

LAUNCHERS: dict[str, Callable[[Job], dict[str, str]]] = {
    "local": shell_jobs.local,
    "torchrun": shell_jobs.torchrun,
    "deepspeed": shell_jobs.deepspeed,
    "slurm": shell_jobs.slurm,
    "mpi": shell_jobs.mpi,
    "k8s": cloud_jobs.k8s,
    "azureml": cloud_jobs.azureml,
    "azure-vm": cloud_jobs.azure_vm,
}

EXAMPLES = """\
examples:
  mds-train launch run.toml --launcher slurm --nodes 16 --processes 8 --run-dir /shared/run --print
  mds-train launch run.toml --launcher k8s --nodes 2 --processes 8 --run-dir /data/run \\
      --mount shared-disk:/data --secret WANDB_API_KEY --parallel.tp-size 8

Nothing is submitted. The job's command is the same at each start and goes on from the newest
checkpoint, so a job that was cut off is started again as it is, on as many machines as there are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; settings of the run may follow."""
    add = parser.add_argument
    add("config", metavar="CONFIG.toml", help="as the job will see it")
    add("--launcher", choices=tuple(LAUNCHERS), required=True)
    add("--run-dir", required=True, metavar="DIR", help="on storage that all machines see")
    add("--name", default="mds-train", help="of the job (%(default)s)")
    add("--nodes", type=int, default=1, metavar="N", help="machines (%(default)s)")
    add("--processes", type=int, default=1, metavar="N", help="ranks a machine (%(default)s)")
    add("--cpu", action="store_true", help="ask for no GPUs")
    add("--cpus", type=int, default=8, metavar="N", help="cores a rank (%(default)s)")
    add("--minutes", type=int, default=1440, metavar="N", help="time limit (%(default)s)")
    add("--restarts", type=int, default=3, metavar="N", help="after failures (%(default)s)")
    add("--fewest", type=int, default=1, metavar="N", help="machines to go on with (%(default)s)")
    add("--port", type=int, default=29400, metavar="N", help="of the rendezvous (%(default)s)")
    add("--host", default="HEAD_NODE", help="the first machine, where the cluster gives no name")
    add("--image", default="mds-train:latest", help="container (%(default)s)")
    add("--mount", action="append", default=[], metavar="SOURCE:/PATH", help="repeat it")
    add("--secret", action="append", default=[], metavar="NAME", help="variable from the secrets")
    add("--env", action="append", default=[], metavar="NAME=TEXT", help="variable; no secrets")
    add("--queue", help="partition, namespace or compute target")
    add("--account", help="Slurm's account, Azure's resource group")
    add("--output", type=Path, default=Path(), metavar="DIR", help="where to write (here)")
    add("--print", action="store_true", dest="show", help="print instead of writing files")


def write_job(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write or print the job's files.

    Raises:
        UsageError: If the options make no job.
        InputError: If a file exists and says something else.
    """
    files = LAUNCHERS[options.launcher](_job(options, overrides))
    if options.show:
        for name, text in files.items():
            head = f"# --- {name}\n" if len(files) > 1 else ""
            sys.stdout.write(head + text)
        return ExitCode.DONE
    paths = {options.output / name: text for name, text in files.items()}
    for path, text in paths.items():
        if path.exists() and path.read_text("utf-8") != text:
            raise InputError(f"{path} exists and is another job; choose another --name or folder.")
    options.output.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
        if path.suffix == ".sh":
            path.chmod(0o755)
        sys.stdout.write(f"{path}\n")
    return ExitCode.DONE


def _job(options: argparse.Namespace, overrides: Sequence[str]) -> Job:
    return Job(
        name=options.name,
        config=options.config,
        run_dir=options.run_dir,
        overrides=tuple(overrides),
        nodes=options.nodes,
        processes=options.processes,
        use_gpu=not options.cpu,
        cpus=options.cpus,
        minutes=options.minutes,
        restarts=options.restarts,
        fewest=options.fewest,
        port=options.port,
        host=options.host,
        image=options.image,
        mounts=[Mount.parse(text) for text in options.mount],
        secrets=options.secret,
        variables=dict(_assignment(text) for text in options.env),
        queue=options.queue,
        account=options.account,
    )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env {text!r} must be NAME=TEXT.")
    return name, value
