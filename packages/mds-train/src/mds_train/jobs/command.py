"""The command ``mds-train launch``."""

from __future__ import annotations

import argparse
import logging
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from mds_train.errors import ExitCode, InputError, UsageError
from mds_train.jobs import cloud_jobs, shell_jobs
from mds_train.jobs.job import UNNAMED, Job, Mount

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

_CARRIED = {"k8s": "/etc/mds-train", "azureml": "", "azure-vm": "/opt/mds-train"}
"""Launchers whose machines see no disk of this one, and where they find the configuration."""

logger = logging.getLogger(__name__)

EXAMPLES = """\
examples:
  mds-train launch run.toml --launcher slurm --nodes 16 --processes 8 --run-dir /shared/run --print
  mds-train launch run.toml --launcher k8s --nodes 2 --processes 8 --run-dir /data/run \\
      --mount shared-disk:/data --secret WANDB_API_KEY --parallel.tp-size 8

Nothing is submitted. The job's command is the same at each start and goes on from the newest
checkpoint, so a job that was cut off is started again as it is, on as many machines as there are.
Jobs of k8s, azureml and azure-vm carry the configuration; its data.store must be on a --mount.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options; settings of the run may follow."""
    add = parser.add_argument
    add(
        "config",
        metavar="CONFIG.toml",
        help="the settings; a path from here, or an absolute one of the job's storage",
    )
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
    add("--host", default=UNNAMED, help="the first machine, where the cluster gives no name")
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
    config, text = _configuration(options)
    job = Job(
        name=options.name,
        config=config,
        config_text=text,
        run_dir=_run_dir(options),
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
    if options.launcher in _CARRIED and not job.is_mounted(job.run_dir):
        raise UsageError(
            f"--run-dir {job.run_dir} is on no --mount, and what a container writes elsewhere is "
            f"lost with it; add --mount SOURCE:/PATH and put the run below that path."
        )
    if text is not None:
        _note_relative_store(text, overrides)
    return job


def _configuration(options: argparse.Namespace) -> tuple[str, str | None]:
    """The path of the settings in the job, and the settings if the job's files carry them.

    Raises:
        InputError: If a relative path is wrong.
    """
    path = Path(options.config)
    if not path.is_file():
        if path.is_absolute():  # of a disk that only the job sees
            return options.config, None
        raise InputError(
            f"{path}: there is no such file here; check the path, or name the absolute one of a "
            f"file on the job's storage."
        )
    if options.launcher not in _CARRIED:
        return str(path.resolve()), None
    return f"{_CARRIED[options.launcher]}/{path.name}", _whole_text(path)


def _whole_text(path: Path) -> str:
    """The file as it is; with what it is based on, if it names a base."""
    from mds_train.config.loading import given_settings, read_toml

    settings = read_toml(path)
    text = path.read_text(encoding="utf-8")
    return given_settings(settings) if "base" in tomllib.loads(text) else text


def _run_dir(options: argparse.Namespace) -> str:
    """Absolute, since scripts are started from anywhere; a container's disks are not this one's."""
    given: str = options.run_dir
    return given if options.launcher in _CARRIED else str(Path(given).absolute())


def _note_relative_store(text: str, overrides: Sequence[str]) -> None:
    store = tomllib.loads(text).get("data", {}).get("store")
    named = any(word.startswith("--data.store") for word in overrides)
    if isinstance(store, str) and not named and not store.startswith("/") and "://" not in store:
        logger.warning(
            "data.store is %r, which the job looks for in its own working folder; add --data.store "
            "with its path on the job's storage.",
            store,
        )


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--env {text!r} must be NAME=TEXT.")
    return name, value
