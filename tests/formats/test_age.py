"""The real age and our key files: each opens what the other wrote."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mds_data import KeySource, open_store, write_store
from mds_data.cli import main

pytestmark = pytest.mark.skipif(
    shutil.which("age") is None, reason="the program age is not installed here"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", [np.arange(50, dtype=np.uint16)], vocab_size=50)
    return tmp_path / "store"


def age(*words: str | Path) -> bytes:
    return subprocess.run(["age", *map(str, words)], check=True, capture_output=True).stdout


def test_age_opens_our_key_file_with_our_identity(store: Path, tmp_path: Path) -> None:
    identity, sealed = tmp_path / "key.txt", tmp_path / "sealed"
    main(["encrypt", str(store), "--new-identity", str(identity), "--output", str(sealed)])

    line = age("-d", "-i", identity, sealed / "key-1.age").decode()

    contents = open_store(sealed, key=KeySource(identity=identity)).parts[0].folder.contents
    assert line == f"mds-data-key/1 {contents.envelope.folder} {contents.data_key.hex()}\n"


def test_we_open_with_an_identity_that_age_made(store: Path, tmp_path: Path) -> None:
    identity, sealed = tmp_path / "key.txt", tmp_path / "sealed"
    subprocess.run(["age-keygen", "-o", identity], check=True, capture_output=True)
    recipient = identity.read_text().partition("public key: ")[2].split()[0]

    code = main(["encrypt", str(store), "--recipient", recipient, "--output", str(sealed)])

    assert code == 0
    with open_store(sealed, key=KeySource(identity=identity)) as opened:
        assert opened[0].tolist() == list(range(50))
