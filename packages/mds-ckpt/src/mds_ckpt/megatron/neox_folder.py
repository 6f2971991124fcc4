"""Tell GPT-NeoX's checkpoint folders from those of other code that saves with DeepSpeed.

With pipeline stages its layers begin at 0, where Megatron-DeepSpeed's begin at 1. Without stages
all layers are in the model files, as ``sequential.N``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mds_ckpt.errors import RejectedError
from mds_ckpt.files.regular_file import RegularFile
from mds_ckpt.megatron.deepspeed_folder import list_folder
from mds_ckpt.pickles.archive import open_torch_file

__all__ = ["is_gpt_neox"]

_FIRST_LAYER = (0, 0)
_SEQUENTIAL = "sequential."
_FRONT = 1 << 20
"""Bytes of a model file among which the first name stands."""


def is_gpt_neox(folder: Path) -> bool:
    """Whether a folder of DeepSpeed's files is GPT-NeoX's; False for anything damaged."""
    listing = list_folder(folder)
    if listing.layers:
        return _FIRST_LAYER in listing.layers
    models = {**listing.models, **listing.stage_3_models}
    return bool(models) and _is_sequential(min(models.items())[1])


def _is_sequential(path: Path) -> bool:
    try:
        with RegularFile(path, cache_links=True).open() as file:
            # DeepSpeed stores the module first; whatever else the file is, it is not parsed twice.
            if _SEQUENTIAL.encode() not in file.read(0, min(file.size, _FRONT)):
                return False
        state = open_torch_file(path).value
    except RejectedError:
        return False
    module = state.get("module") if isinstance(state, Mapping) else None
    return isinstance(module, Mapping) and str(next(iter(module), "")).startswith(_SEQUENTIAL)
