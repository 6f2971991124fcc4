"""One run from its configuration to its end: settings, ranks, logs and watchers around the loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mds_ckpt import commit
from mds_train.config import TrainConfig
from mds_train.config.loading import (
    Setting,
    Settings,
    build,
    document_with_origins,
    read_toml,
    read_variables,
)
from mds_train.config.megatron_flags import resolve_old_flags
from mds_train.config.overrides import read_overrides
from mds_train.engines.own_json import check_own_json
from mds_train.errors import InputError
from mds_train.launch import Environment, distributed
from mds_train.log import FILE_ONLY, logging_to
from mds_train.watch import watching

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from mds_train.loop import TrainResult

__all__ = [
    "CONFIG_FILE",
    "check_new_run",
    "check_store",
    "checked_config",
    "merged_settings",
    "perform",
    "settings_of_new_run",
    "settings_of_resumed_run",
    "write_config",
]

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
"""The resolved configuration inside the folder of a run."""

_PATHS = (
    "data.store",
    "data.stores",
    "data.valid_stores",
    "data.tokenizer",
    "checkpoint.load",
    "distill.teacher",
    "checkpoint.backup",
    "checkpoint.backup_identity",
    "checkpoint.identity",
    "checkpoint.passphrase_file",
    "data.identity",
    "data.passphrase_file",
    "engine.deepspeed_config",
    "train.run_dir",
    "train.kill_switch_file",
)


def settings_of_new_run(
    path: Path, arguments: Sequence[str], *, environment: Environment, prog: str
) -> Settings:
    """Merge a configuration file, MDS_* variables and the command line.

    Raises:
        InputError: If the file or a variable is wrong.
        UsageError: If an option is wrong.
    """
    return merged_settings(read_toml(path), arguments, environment=environment, prog=prog)


def merged_settings(
    given: Settings, arguments: Sequence[str], *, environment: Environment, prog: str
) -> Settings:
    """Merge settings with MDS_* variables and the command line, which win.

    Raises:
        InputError: If a variable is wrong.
        UsageError: If an option is wrong.
    """
    overrides = read_overrides(arguments, prog=prog)
    settings = {
        **given,
        **read_variables(environment.settings),
        **overrides.old.settings,
        **overrides.settings,
    }
    return _absolute_paths(resolve_old_flags(overrides.old, settings=settings))


def named_settings(arguments: Sequence[str], *, environment: Environment, prog: str) -> Settings:
    """What MDS_* variables and the command line say by the settings' own names, and no more."""
    overrides = read_overrides(arguments, prog=prog)
    return {**read_variables(environment.settings), **overrides.settings}


def settings_of_resumed_run(
    run_dir: Path, arguments: Sequence[str], *, environment: Environment, prog: str
) -> Settings:
    """Merge the configuration that a run has written with MDS_* variables and the command line.

    Raises:
        InputError: If the folder is not a run's.
        UsageError: If an option is wrong.
    """
    path = run_dir / CONFIG_FILE
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: there is no such run; check the path.")
    if not path.is_file():
        raise InputError(
            f"{run_dir}: no {CONFIG_FILE}, so this is not the folder of a run; "
            "`mds-train run CONFIG.toml` starts one."
        )
    settings = settings_of_new_run(path, arguments, environment=environment, prog=prog)
    here = Setting(value=str(run_dir.resolve()), origin="command line RUN_DIR")
    return {**settings, "train.run_dir": here}


def _absolute_paths(settings: Settings) -> Settings:
    """Make paths absolute, so that the run resumes from any folder."""
    return {
        key: replace(item, value=_absolute(item.value)) if key in _PATHS and item.value else item
        for key, item in settings.items()
    }


def _absolute(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value if "://" in value else os.path.realpath(value)
    return tuple(os.path.realpath(path) for path in value)


def check_new_run(config: TrainConfig) -> None:
    """Refuse to start a run over another one, unless it goes on with itself.

    Raises:
        InputError: If the run's folder has checkpoints and checkpoint.load does not name it too.
    """
    from mds_ckpt.commit import step_folders
    from mds_train.config.schema import continues_itself

    if continues_itself(config):
        return
    run_dir = Path(config.train.run_dir)
    checkpoints = run_dir / "checkpoints"
    found = step_folders(checkpoints) if checkpoints.is_dir() else []
    if found:
        raise InputError(
            f"{run_dir}: this run has checkpoints already (the newest is {found[0].name}); go on "
            f"with `mds-train resume {run_dir}`, or choose another --train.run-dir."
        )


def check_store(config: TrainConfig) -> None:
    """Look whether the data is there, before anything is started.

    Raises:
        InputError: If it is not.
    """
    for path in (*config.data.paths, *config.data.valid_stores):
        store = Path(path)
        if not store.exists() and not store.with_name(store.name + ".idx").exists():
            raise InputError(
                f"{store}: there is no such token store (data.store); make it with `mds-data "
                "preprocess`, or correct the path."
            )


def checked_config(settings: Settings, *, world_size: int) -> TrainConfig:
    """Make the configuration and check it against the number of ranks.

    Raises:
        InputError: If something is missing or contradictory. All ranks find the same.
    """
    try:
        config = build(settings)
        config.check_world(world_size)
        check_own_json(config, world_size=world_size)
    except ValueError as error:
        raise InputError(str(error)) from error
    return config


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    config: TrainConfig
    settings: Settings
    environment: Environment
    console: Console
    resume: bool


def perform(
    settings: Settings, *, environment: Environment, console: Console, resume: bool
) -> TrainResult:
    """Train: connect the ranks, open logs and watchers, run the loop, close everything.

    Args:
        settings: all layers merged.
        environment: who this process is.
        console: where rank 0 prints.
        resume: go on from the newest checkpoint of the run's folder.
    """
    config = checked_config(settings, world_size=environment.world_size)
    job = _Job(
        config=config, settings=settings, environment=environment, console=console, resume=resume
    )
    with distributed(
        environment,
        device=config.train.device,
        timeout_seconds=config.parallel.timeout_seconds,
    ) as device:
        return _logged(job, device=device)


def _logged(job: _Job, *, device: torch.device) -> TrainResult:
    run_dir, rank = Path(job.config.train.run_dir), job.environment.rank
    commit.make_folders(run_dir)
    with logging_to(run_dir, rank=rank, console=None, json_lines=job.config.watch.json_logs):
        try:
            if rank == 0 and not job.resume:
                write_config(run_dir, job.settings)
            return _watched(job, device=device)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(run_dir)  # A failed write() does not say where.
            logger.error("The run failed.", exc_info=True, extra=FILE_ONLY)  # noqa: G201
            raise


def _watched(job: _Job, *, device: torch.device) -> TrainResult:
    from mds_train.loop import train

    with watching(
        job.config,
        rank=job.environment.rank,
        console=job.console,
        device_name=_device_name(device),
    ) as watchers:
        result = train(job.config, resume=job.resume, watchers=watchers)
    if job.config.lora.rank and job.environment.rank == 0 and result.checkpoint is not None:
        if job.config.checkpoint.encrypt_to:
            logger.info("No adapter for the peft library is written: it would be a plain file.")
        else:
            _write_adapter(job)
    return result


def _write_adapter(job: _Job) -> None:
    """Leave what was trained in a form that others load; a model without one is no failure."""
    from mds_train.finetune.adapter import write_adapter

    try:
        folder = write_adapter(Path(job.config.train.run_dir))
    except InputError as error:
        logger.warning("%s", error)
    else:
        sentence = f"The adapters, for the peft library: {folder}"
        job.console.print(sentence, markup=False, soft_wrap=True)


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    import torch

    return torch.cuda.get_device_name(device)


def write_config(run_dir: Path, settings: Settings) -> None:
    """Keep the resolved configuration, which a resumed run needs, past any power loss.

    Where this run was to pause is no part of it.
    """
    commit.make_folders(run_dir)
    kept = {key: item for key, item in settings.items() if key != "train.exit_step"}
    commit.replace_file(run_dir / CONFIG_FILE, document_with_origins(kept).encode())
