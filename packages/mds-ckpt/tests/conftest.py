"""What all tests share: none of them waits for a real disk.

That files are forced to the disk before anything is renamed is shown with disks that record, break
and forget (``ckpt_disks``). The real one would add nothing to that but minutes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def without_waiting_for_the_disk() -> Iterator[None]:
    """Forcing a file to the real disk does nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
