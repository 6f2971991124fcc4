"""The parity matrix is made of the models and runs of mds-core's own tests."""

from __future__ import annotations

import sys
from pathlib import Path

CELLS = Path(__file__).parents[2] / "packages" / "mds-core" / "tests"
# Ranks are started by spawning, which hands this path on to them.
sys.path.insert(0, str(CELLS))
