"""What the system sees while a store or checkpoint is encrypted: no plain byte, no key, no secret.

Every write and every argument list of the process and its children is traced.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mds_ckpt
from mds_ckpt import commit
from mds_ckpt.files.sealed_folder import SealedFolder
from mds_ckpt.formats.mds import merge_rank_files, write_rank_file
from mds_ckpt.manifest import CheckpointManifest, ModelRecord
from mds_data import KeySource, open_store, write_store

CANARY = b"no-one-may-see-this-canary-in-a-file"
PASSPHRASE = "a-passphrase-that-stays-in-its-file"
WRITES = "trace=write,pwrite64,writev,pwritev,pwritev2,sendto,sendmsg,execve"


def can_trace() -> bool:
    if shutil.which("strace") is None:
        return False
    done = subprocess.run(["strace", "-f", "true"], check=False, capture_output=True)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_trace(), reason="strace is not here, or may not trace")


def traced(folder: Path, *words: str | Path) -> list[tuple[str, bytes]]:
    """Run a module's command; each write with the file that it goes to, and each argument list."""
    log = folder / "trace.txt"
    command = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-e", WRITES, "-o", str(log)]
    subprocess.run([*command, sys.executable, "-m", *map(str, words)], check=True, timeout=300)
    seen = []
    for line in log.read_text().splitlines():
        target = re.search(r"\((?:\d+)<([^>]*)>", line)
        data = b"".join(
            bytes.fromhex(text.replace("\\x", "")) for text in re.findall(r'"((?:\\x..)*)"', line)
        )
        name = bytes.fromhex(target[1].replace("\\x", "")).decode() if target else ""
        seen.append((name, data))
    return seen


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tokens = np.frombuffer(CANARY * 500, np.uint16)
    write_store(tmp_path / "store", [tokens], vocab_size=65536)
    return tmp_path / "store"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    array = np.frombuffer(CANARY * 500, np.uint8)
    partial = commit.stage(tmp_path / "run", 1)
    size = len(array)
    written = write_rank_file(partial, 0, [("w", "weight", ((0, size),), None, array)])
    parameters, files = merge_rank_files({"w": (size,)}, [written])
    manifest = CheckpointManifest(
        producer={"name": "test", "version": "0"},
        step=1,
        counters={},
        model=ModelRecord(family="gpt", config={}, vocab_size=5, tied_embeddings=True),
        parameters=parameters,
        files=files,
    )
    return commit.publish(partial, manifest, root=tmp_path / "run")


def test_a_store_is_encrypted_without_a_trace(store: Path, tmp_path: Path) -> None:
    identity, sealed = tmp_path / "key.txt", tmp_path / "sealed"

    seen = traced(
        tmp_path, "mds_data", "encrypt", store, "--new-identity", identity, "--output", sealed
    )

    contents = open_store(sealed, key=KeySource(identity=identity)).parts[0].folder.contents
    secret = identity.read_bytes().split()[-1]
    _expect_nothing(seen, contents.data_key, secret=secret, kept=identity)
    assert any(name.endswith(".sealed") or "partial" in name for name, _ in seen)


def test_reading_writes_nothing_plain(store: Path, tmp_path: Path) -> None:
    identity, sealed = tmp_path / "key.txt", tmp_path / "sealed"
    traced(tmp_path, "mds_data", "encrypt", store, "--new-identity", identity, "--output", sealed)

    seen = traced(tmp_path, "mds_data", "verify", sealed, "--identity", identity)

    contents = open_store(sealed, key=KeySource(identity=identity)).parts[0].folder.contents
    _expect_nothing(seen, contents.data_key, secret=identity.read_bytes().split()[-1])


def test_the_trace_shows_what_decrypting_writes(store: Path, tmp_path: Path) -> None:
    """The control: where plain bytes are asked for, they are seen."""
    identity, sealed, out = (tmp_path / name for name in ("key.txt", "sealed", "out"))
    traced(tmp_path, "mds_data", "encrypt", store, "--new-identity", identity, "--output", sealed)

    seen = traced(tmp_path, "mds_data", "decrypt", sealed, "--identity", identity, "--output", out)

    assert any(CANARY in data for _, data in seen)


def test_a_checkpoint_is_encrypted_and_backed_up_without_a_trace(
    checkpoint: Path, tmp_path: Path
) -> None:
    sealed, passphrase = tmp_path / "sealed", tmp_path / "passphrase.txt"
    passphrase.write_text(PASSPHRASE)
    option = ["--passphrase-file", passphrase]

    seen = traced(tmp_path, "mds_ckpt", "encrypt", checkpoint, sealed, *option)
    seen += traced(tmp_path, "mds_ckpt", "backup", checkpoint, "--to", tmp_path / "place", *option)

    source = mds_ckpt.KeySource(passphrase_file=passphrase)
    key = SealedFolder(sealed, source).contents.data_key
    _expect_nothing(seen, key, secret=PASSPHRASE.encode())


def _expect_nothing(
    seen: list[tuple[str, bytes]], key: bytes, *, secret: bytes, kept: Path | None = None
) -> None:
    assert seen
    for name, data in seen:
        for hidden in (CANARY, key, key.hex().encode()):
            assert hidden not in data, name
        assert secret not in data or (kept is not None and name == str(kept)), name
