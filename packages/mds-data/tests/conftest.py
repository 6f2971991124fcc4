import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Tests look at what is asked of the disk, not at how long it takes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
