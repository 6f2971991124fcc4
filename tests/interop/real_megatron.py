"""What the real DeepSpeed needs around it to read Megatron's files: an enum and an environment."""

from __future__ import annotations

import enum
import os
import sys
import types
from pathlib import Path


def environment(scratch: Path) -> dict[str, str]:
    """What a process needs to run DeepSpeed on the CPU; it writes only below ``scratch``."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(scratch / "extensions"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def pretend_megatron() -> None:
    """Provide the one class of Megatron's that stored arguments name, as its code would."""

    class ModelType(enum.Enum):
        encoder_or_decoder = 1
        encoder_and_decoder = 2

    names = ("megatron", "megatron.core", "megatron.core.enums")
    modules = [types.ModuleType(name) for name in names]
    ModelType.__module__ = names[-1]
    ModelType.__qualname__ = "ModelType"
    modules[-1].ModelType = ModelType  # type: ignore[attr-defined]
    sys.modules.update(zip(names, modules, strict=True))
