"""Opens the model that a path means: a checkpoint, a run's newest one, an adapter and its base.

A run with LoRA saves its adapters alone. Whoever asks for its model gets the weights that were
adapted with the adapters added to them, read when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mds_ckpt import Checkpoint, KeySource, commit, companions, open_checkpoint
from mds_ckpt.adapter import CONFIG_NAME, Factors, with_adapter, with_factors
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.files.sealed_folder import is_sealed
from mds_train.errors import InputError

__all__ = [
    "adapters_of",
    "companion",
    "find_checkpoint",
    "folder_to_load",
    "lora_of",
    "open_model",
]

_FIRST, _SECOND = ".adapter.linear_in.weight", ".adapter.linear_out.weight"


def find_checkpoint(path: str | Path) -> Path:
    """Return the path that mds_ckpt can open: for the folder of a run, its checkpoints.

    Raises:
        InputError: If there is no such path.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: there is no such checkpoint; check the path.")
    inner = path / "checkpoints"
    return inner if inner.is_dir() else path


def folder_to_load(path: str) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one in a run or a folder."""
    root = find_checkpoint(path)
    newest = commit.find_latest(root).folder if commit.step_folders(root) else None
    return newest or root


def open_model(
    path: str | Path, *, adapter: Path | None = None, key: KeySource | None = None
) -> Checkpoint:
    """Open a whole model.

    Args:
        path: a checkpoint's folder, a folder of checkpoints (the newest good one is taken), the
            folder of a run, or that of an adapter in the peft library's format, which names its
            base.
        adapter: folder of such an adapter that is added to the weights.
        key: opens an encrypted checkpoint; where there is none it is not asked for.

    Raises:
        InputError: If there is no such path, or the base of an adapter is not there.
    """
    found = find_checkpoint(path)
    if (found / CONFIG_NAME).is_file() and not (found / "config.json").is_file():
        if adapter is not None:
            raise InputError(f"{found}: this is an adapter itself; name its base, or it alone.")
        return open_model(_named_base(found), adapter=found, key=key)
    checkpoint = open_checkpoint(found, key=_needed(found, key))
    if lora_of(checkpoint):
        checkpoint = _with_own_adapters(checkpoint, key)
    return checkpoint if adapter is None else with_adapter(checkpoint, adapter)


def _needed(path: Path, key: KeySource | None) -> KeySource | None:
    """The key, where something is encrypted: of an adapter and its base perhaps one is."""
    if key is None:
        return None
    return key if any(map(is_sealed, (path, *commit.step_folders(path)))) else None


def companion(checkpoint: Checkpoint, name: str) -> Path | RegularFile | None:
    """A small file that travels with a model, also inside an encrypted one; None if it has none."""
    return companions.beside(checkpoint.companions, checkpoint.sealed).get(name)


def lora_of(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The [lora] table of a run's checkpoint that holds adapters alone; else None."""
    table = (checkpoint.training.get("config") or {}).get("lora") or {}
    return table if table.get("rank") else None


def adapters_of(checkpoint: Checkpoint) -> dict[str, Factors]:
    """Adapters of a run's checkpoint by the canonical name of the weight that they stand beside."""
    table = lora_of(checkpoint) or {}
    # What the optimizer steps; the weights are these numbers, perhaps rounded.
    tensors = checkpoint.states.get("master") or checkpoint.tensors
    return {
        name.removesuffix(_FIRST) + ".weight": Factors(
            tensors[name].numpy,
            tensors[name.removesuffix(_FIRST) + _SECOND].numpy,
            table["alpha"] / table["rank"],
        )
        for name in tensors
        if name.endswith(_FIRST)
    }


def _with_own_adapters(checkpoint: Checkpoint, key: KeySource | None) -> Checkpoint:
    """What a run with LoRA has made of the model that it started from."""
    base = Path(str(checkpoint.training["config"]["checkpoint"]["load"]))
    if not base.exists():
        raise InputError(
            f"{checkpoint.path}: it holds adapters of {base}, which is not there any more; put the "
            f"model back to that place."
        )
    whole = with_factors(open_model(base, key=key), adapters_of(checkpoint))
    return replace(
        whole,
        path=checkpoint.path,
        companions={**whole.companions, **checkpoint.companions},
        sealed={**whole.sealed, **checkpoint.sealed},
    )


def _named_base(folder: Path) -> Path:
    base = Path(str(companions.read_json(folder / CONFIG_NAME).get("base_model_name_or_path")))
    if not base.exists():
        raise InputError(
            f"{folder}: it names {str(base)!r} as its base, which is no folder here; name the "
            f"model and add --adapter {folder}."
        )
    return base
