"""A job, whatever starts it: what is run, on how many machines, with which secrets and mounts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from mds_train.errors import UsageError

__all__ = ["UNNAMED", "Job", "Mount"]

UNNAMED = "HEAD_NODE"
"""Stands for the first machine, whose name nobody has said."""

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """Storage that the job sees: a volume claim, datastore or host folder at a path."""

    source: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Mount:
        """``SOURCE:/path``; UsageError otherwise."""
        source, _, path = text.rpartition(":")
        if not source or not path.startswith("/"):
            raise UsageError(f"--mount {text!r} must be SOURCE:/path, such as shared-disk:/data.")
        return cls(source=source, path=path.rstrip("/") or "/")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a job file says.

    The command is the same at every start, and goes on from the newest checkpoint if there is one;
    so a job that was cut off is simply started again.
    """

    name: str
    config: str
    """Path of the TOML file, as the job sees it."""
    config_text: str | None = None
    """The file itself, where the job's files carry it; None where the job finds it on a disk."""
    run_dir: str
    """Folder of the run, on storage that all machines and later starts see."""
    overrides: Sequence[str] = ()
    nodes: int = 1
    processes: int = 1
    """Ranks of one machine: one a GPU, or one a NUMA node."""
    use_gpu: bool = True
    cpus: int = 8
    """Cores of one rank."""
    minutes: int = 24 * 60
    restarts: int = 3
    fewest: int = 1
    """Machines with which the job is still started again after a failure."""
    port: int = 29400
    host: str = UNNAMED
    """Name of the first machine, where the launcher does not know it."""
    image: str = "mds-train:latest"
    mounts: Sequence[Mount] = ()
    secrets: Sequence[str] = ()
    """Names of variables whose values the cluster's secret store holds; never values."""
    variables: dict[str, str] = field(default_factory=dict)
    queue: str | None = None
    """Partition, namespace or compute target."""
    account: str | None = None
    """Account of Slurm, resource group of Azure."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"--name {self.name!r} must be of small letters, digits and dashes, at most 47, "
                f"beginning with a letter; clusters take no other names."
            )
        for key in ("nodes", "processes", "cpus", "minutes", "port", "fewest"):
            if getattr(self, key) < 1:
                raise UsageError(f"--{key} must be at least 1.")
        for name in (*self.secrets, *self.variables):
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"{name!r} is no name of an environment variable.")

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.nodes * self.processes

    @property
    def head(self) -> str:
        """What a script takes for the first machine unless HEAD names it."""
        if self.nodes == 1:
            return "${HEAD:-127.0.0.1}"
        if self.host == UNNAMED:
            return "${HEAD:?name the first machine in it, or write the job with --host}"
        return f"${{HEAD:-{self.host}}}"

    def is_mounted(self, path: str) -> bool:
        """Whether something lies on one of the mounts."""
        return any(PurePosixPath(path).is_relative_to(mount.path) for mount in self.mounts)

    def arguments(self) -> list[str]:
        """Words behind ``mds-train``: start, or go on from the newest checkpoint."""
        return [
            *("run", self.config, *self.overrides),
            *("--train.run-dir", self.run_dir),
            *("--checkpoint.load", self.run_dir, "--checkpoint.from-scratch-if-missing"),
        ]

    def command(self, program: Sequence[str] = ("mds-train",), *, indent: str = "  ") -> str:
        """The command for a shell, one option a line."""
        words = [shlex.quote(word) for word in (*program, *self.arguments())]
        lines: list[str] = []
        for word in words:
            if lines and not word.startswith("--"):
                lines[-1] += f" {word}"
            else:
                lines.append(word)
        return f" \\\n{indent}".join(lines)

    def exports(self) -> str:
        """``export`` lines of the variables; secrets come from the environment they are set in."""
        lines = [f"export {name}={shlex.quote(text)}" for name, text in self.variables.items()]
        lines += [f': "${{{name}:?set it before you submit the job}}"' for name in self.secrets]
        return "".join(f"{line}\n" for line in lines)
