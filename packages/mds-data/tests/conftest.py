"""What the tests of several modules are given."""

import os

import pytest
from encryption_material import DOCUMENTS
from store_material import write_small

from mds_data import KeySource
from mds_data.encryption import keys
from mds_data.store.encrypt import encrypt_store


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Tests look at what is asked of the disk, not at how long it takes."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def identity(tmp_path):
    path = tmp_path / "key.txt"
    return keys.new_identity(path), KeySource(identity=path)


@pytest.fixture(params=["hot", "archive"])
def plain(tmp_path, request):
    write_small(tmp_path / "plain", DOCUMENTS, layout=request.param)
    return tmp_path / "plain"


@pytest.fixture
def sealed(plain, identity):
    encrypt_store(plain, plain.with_name("sealed"), recipients=[identity[0]])
    return plain.with_name("sealed")
