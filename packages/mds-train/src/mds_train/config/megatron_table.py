"""Megatron(-DeepSpeed)'s flags and what each becomes here: a field, a warning, or an error.

A warning says that the flag does nothing and why, an error what to write instead. A flag may have
several names: the original's misspelt ones and their correct twins. Dashes and underscores are
alike.
"""

from __future__ import annotations

from mds_train.config.megatron_kinds import OldFlag
from mds_train.config.megatron_layout_flags import LAYOUT_FLAGS
from mds_train.config.megatron_model_flags import MODEL_FLAGS
from mds_train.config.megatron_run_flags import RUN_FLAGS
from mds_train.config.megatron_specialties import SPECIALTIES
from mds_train.config.megatron_training_flags import TRAINING_FLAGS

__all__ = ["OLD_FLAGS"]

OLD_FLAGS: tuple[OldFlag, ...] = (
    *MODEL_FLAGS,
    *TRAINING_FLAGS,
    *LAYOUT_FLAGS,
    *RUN_FLAGS,
    *SPECIALTIES,
)
"""Every flag of the original that is known here."""
