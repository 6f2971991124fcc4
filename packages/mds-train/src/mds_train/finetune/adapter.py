"""Writes what a run with LoRA has trained: as an adapter of the peft library's, or in the model."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt import convert, open_checkpoint
from mds_ckpt.adapter import WrittenAdapter
from mds_ckpt.errors import CheckpointError
from mds_train.errors import InputError
from mds_train.model_source import adapters_of, find_checkpoint, lora_of, open_model

__all__ = ["ADAPTER", "MERGED", "merge_adapter", "write_adapter"]

ADAPTER, MERGED = "adapter", "merged"
"""Folders inside that of a run."""


def write_adapter(run_dir: Path) -> Path:
    """Write the newest checkpoint's adapters into RUN_DIR/adapter, in place of older ones.

    Raises:
        InputError: The run trains no adapters, or transformers has no such model.
    """
    checkpoint = open_checkpoint(find_checkpoint(run_dir))
    table = lora_of(checkpoint)
    if table is None:
        raise InputError(f"{run_dir}: this run trains no adapters (lora.rank is 0).")
    base = Path(checkpoint.training["config"]["checkpoint"]["load"])
    adapter = WrittenAdapter(
        model=checkpoint.model,
        factors=adapters_of(checkpoint),
        rank=table["rank"],
        alpha=table["alpha"],
        dropout=table["dropout"],
        base=str(base),
        model_type=(open_model(base).origin.get("huggingface") or {}).get("model_type"),
    )
    try:
        adapter.write(run_dir / ADAPTER)
    except ValueError as error:
        raise InputError(
            f"{checkpoint.path}: its adapters have no form in the peft library: {error}; "
            f"`mds-train generate {run_dir}` uses them all the same."
        ) from error
    return run_dir / ADAPTER


def merge_adapter(run_dir: Path) -> Path:
    """Write the model with the adapters in it into RUN_DIR/merged, as transformers has it.

    Raises:
        InputError: If that is there already, or the base is not.
    """
    adapter = write_adapter(run_dir)
    checkpoint = open_checkpoint(find_checkpoint(run_dir))
    base = find_checkpoint(checkpoint.training["config"]["checkpoint"]["load"])
    try:
        convert(base, run_dir / MERGED, to="hf", adapter=adapter, overwrite=True)
    except CheckpointError as error:
        raise InputError(str(error)) from error
    return run_dir / MERGED
