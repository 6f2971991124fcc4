"""What all tests across packages share: where the golden data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Asserts in helpers say what they compared, too.
pytest.register_assert_rewrite("layouts")

# Ranks need DeepSpeed; see mds_kernels.testing.run_ranks.
os.environ.setdefault("MDS_RANKS_PRELOAD", "mds_train.loop,mds_train.engines.pipeline")

ROOT = Path(__file__).parents[1]


def shared_folder(variable: str, name: str) -> Path:
    """Return the folder that ``variable`` names, or ``../shared/name`` beside the repository."""
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not folder.is_dir():
        pytest.skip(f"golden data is not here: {folder} (set {variable} to where it is)")
    return folder


@pytest.fixture(scope="session")
def golden() -> Path:
    """The checkpoints and datasets written by the real Megatron-DeepSpeed."""
    return shared_folder("MDS_GOLDEN_DIR", "fixtures")


@pytest.fixture(scope="session")
def cases() -> Path:
    """Small inputs from public bug reports, each with the right answer."""
    return shared_folder("MDS_CASES_DIR", "cases")
