"""Ranks are expensive to start (each imports torch), so all tests share one start of each size."""

from __future__ import annotations

from typing import Any

import pytest
from rank_work import on_four_ranks, on_two_ranks

from mds_kernels.testing import run_ranks


@pytest.fixture(scope="session")
def two_ranks() -> list[dict[str, Any]]:
    """What each of two ranks computed for all tests."""
    return run_ranks(on_two_ranks, 2, timeout=240)


@pytest.fixture(scope="session")
def four_ranks() -> list[dict[str, Any]]:
    """What each of four ranks computed for all tests."""
    return run_ranks(on_four_ranks, 4, timeout=240)
